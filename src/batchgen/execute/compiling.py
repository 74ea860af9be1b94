"""torch.compile of a denoiser's repeated blocks, one region compiled for all of them. Only for components that stay on the device.

A streamed block's weights change places under it, and an offloaded one's are other tensors every window: both would compile again
and again.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from batchgen.errors import ModelError


def compile_blocks(name: str, module: nn.Module, mode: str) -> bool:
    """Compiles the module's repeated blocks, at their first call. False where it is no denoiser with blocks that diffusers names.

    Raises ModelError where `mode`, its placement, moves its weights.
    """
    own: Any = module
    if hasattr(module, "decode") or not getattr(module, "_repeated_blocks", None):
        return False
    if mode != "resident":
        raise ModelError(
            f"--compile needs {name} to stay on the device, and it is {mode}",
            hint=f"leave --compile out, or keep it in: --component-residency {name}=resident",
        )
    try:
        # Batches differ in size: one compiled region must take all of them.
        own.compile_repeated_blocks(dynamic=True)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"{name} cannot be compiled: {error}", hint="leave --compile out") from error
    return True
