"""What a user says about loading a model. Apart from the reading of models, so that a command line can be parsed without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchgen.errors import UsageError

DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
    "half": "float16", "float": "float32",
}

OnProgress = Callable[[int, int], None]  # (bytes here, bytes in all), called while a model is downloaded


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the user says about loading. `dtype` and `component_dtypes` take the names of DTYPES; None or "auto": find out."""

    variant: str | None = None
    revision: str | None = None
    dtype: str | None = None
    component_dtypes: tuple[tuple[str, str], ...] = ()
    trust_remote_code: bool = False
    allow_pickle: bool = False
    cache_dir: str | None = None  # huggingface_hub's cache; None: its own place
    download: bool = True  # False: fetch configs and headers at most
    offline: bool = False  # the cache alone, without asking the hub

    def __post_init__(self) -> None:
        for name in (self.dtype, *(dtype for _, dtype in self.component_dtypes)):
            if name not in (None, "auto") and name not in DTYPES:
                raise UsageError(f"unknown dtype {name!r}; one of auto, {', '.join(DTYPES)}", option="--dtype")
