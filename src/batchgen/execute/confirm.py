"""The worker's look at its device before it loads anything: is it the one that the plan was made for?

The plan's devices come from NVML, which sees every card of the machine, in the machine's order. Torch sees the cards of its process,
in CUDA's order, and only if it was built for them. Where the two disagree the night would be spent on the wrong card, or end at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from batchgen.errors import PlanRefusedError
from batchgen.inventory.records import DeviceFacts
from batchgen.units import size_text

# What a driver reports and what torch can have differ by its own share.
_SHARE = 0.9


def use_device(planned: Iterable[DeviceFacts], name: str) -> None:
    """Confirms the worker's device and makes it CUDA's current one: all that names no device then means this one.

    Otherwise events, pinned pages and kernels of libraries would go to the first card, whichever the worker was given. Raises
    PlanRefusedError as `confirm_device`.
    """
    confirm_device(planned, name)
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def confirm_device(planned: Iterable[DeviceFacts], name: str) -> None:
    """Compares torch's device of this name with the plan's. Raises PlanRefusedError where it is missing, another one, or too small."""
    device = torch.device(name)
    if device.type == "cpu":
        return
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise PlanRefusedError(f"the plan is for mps, and this build of torch ({torch.__version__}) cannot use it", option="--device",
                                   hint="Install torch for macOS on Apple silicon, or run with --device cpu.")  # fmt: skip
        return
    if not torch.cuda.is_available():
        raise PlanRefusedError(
            f"the plan is for {name}, and torch {torch.__version__} (CUDA {torch.version.cuda or 'left out'}) cannot use any CUDA device",
            option="--device", hint="Install a build of torch for your driver (pytorch.org says which), or run with --device cpu.",
        )  # fmt: skip
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise PlanRefusedError(f"the plan is for {name}, and torch sees {count} CUDA devices", option="--device",
                               hint="Compare `batchgen doctor` with CUDA_VISIBLE_DEVICES.")  # fmt: skip
    facts = next((facts for facts in planned if facts.torch_name in (name, f"cuda:{index}")), None)
    if facts is not None:
        found = torch.cuda.get_device_properties(index)
        compare(facts, name=found.name, total_bytes=found.total_memory, uuid=str(getattr(found, "uuid", "")) or None)


def compare(planned: DeviceFacts, *, name: str, total_bytes: int, uuid: str | None) -> None:
    """Raises PlanRefusedError if a card found is not the planned one, or has clearly less memory. UUIDs with or without their prefix."""
    if planned.uuid is not None and planned.uuid.startswith("GPU-") and uuid is not None:
        if planned.uuid.removeprefix("GPU-").lower() != uuid.removeprefix("GPU-").lower():
            raise PlanRefusedError(
                f"{planned.torch_name} is {name} ({uuid}) for torch, but the plan was made for {planned.name} ({planned.uuid})",
                option="--device", hint="Set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that both count the cards alike.",
            )  # fmt: skip
        return
    if total_bytes < planned.total_bytes * _SHARE:
        raise PlanRefusedError(
            f"{planned.torch_name} is {name} with {size_text(total_bytes)} for torch, but the plan was made for "
            f"{planned.name} with {size_text(planned.total_bytes)}",
            needed_bytes=planned.total_bytes, available_bytes=total_bytes, option="--device",
            hint="Set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that both count the cards alike.",
        )  # fmt: skip
