"""Which kernels compute attention: diffusers' dispatcher, set on the denoisers as they are loaded."""

from __future__ import annotations

from typing import Any

from torch import nn

from batchgen.errors import ModelError


def check_attention(backend: str | None) -> None:
    """Whether the backend exists here. Raises ModelError with what is missing."""
    if backend is None:
        return
    from diffusers.models import attention_dispatch

    try:
        attention_dispatch._check_attention_backend_requirements(attention_dispatch.AttentionBackendName(backend))
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"the attention backend {backend} cannot be used: {error}", hint="choose another --attention-backend") from error


def set_attention(name: str, module: nn.Module, backend: str | None) -> None:
    """Let the module's attention use `backend`. Modules of other libraries and autoencoders keep their own.

    Raises ModelError where the module's attention does not go through the dispatcher.
    """
    own: Any = module
    if backend is None or not hasattr(module, "set_attention_backend") or hasattr(module, "decode"):
        return
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    # The library also makes it the process's own default, which would reach the modules that are to keep theirs.
    default = Registry._active_backend
    try:
        own.set_attention_backend(backend)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"{name} cannot take the attention backend {backend}: {error}", hint="leave --attention-backend out") from error
    finally:
        Registry.set_active_backend(default)
