"""A model's ordinary pipeline call in the shape of a stage, for models that no blocks split.

Behaves like a stage's pipe: parts are set as attributes, a call takes arguments and gives outputs by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from batchgen.errors import ModelError


def guide_by_part(pipe: Any, guider: Any, inputs: Collection[str], scale: float | None) -> None:
    """Sets a row's guidance where the pipeline takes it from a part of its own instead of its call. `guider`: the folder's, or None."""
    if guider is not None and "guidance_scale" not in inputs and hasattr(guider, "new"):
        pipe.guider = guider if scale is None else guider.new(guidance_scale=scale)


class OrdinaryCall:
    """Makes the pipeline object from its parts at the first call, when all of them are there."""

    def __init__(
        self, pipeline_class: type, settings: Mapping[str, Any], parts: Sequence[str], absent: Sequence[str], device: torch.device
    ) -> None:
        self._class = pipeline_class
        self._settings = dict(settings)
        self._parts: dict[str, Any] = dict.fromkeys((*parts, *absent))
        self._missing = set(parts)
        self._device = device
        self._made: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            self._parts[name] = value
            self._missing.discard(name)
            if self._made is not None:
                setattr(self._made, name, value)
            return
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        parts = object.__getattribute__(self, "__dict__").get("_parts", {})
        if name in parts:
            return parts[name]
        raise AttributeError(name)

    def _pipeline(self) -> Any:
        if self._made is None:
            if self._missing:
                raise ModelError(f"{self._class.__name__} lacks {', '.join(sorted(self._missing))}")
            accepted = inspect.signature(self._class.__init__).parameters  # type: ignore[misc]
            arguments = {name: value for name, value in {**self._settings, **self._parts}.items() if name in accepted}
            device = self._device
            cls = type(self._class.__name__, (self._class,), {
                "device": property(lambda _: device), "_execution_device": property(lambda _: device),
            })
            self._made = cls(**arguments)
            self._made.set_progress_bar_config(disable=True)
        return self._made

    def __call__(self, *, output: Sequence[str], **arguments: Any) -> dict[str, Any]:
        """`images` or `videos` as float arrays [rows, ...] in 0..1; `audio`, a track a row, and `nsfw`, a flag a row, or None."""
        with torch.no_grad():
            result = self._pipeline()(**arguments, output_type="np", return_dict=True)
        frames = getattr(result, "frames", None)
        found: dict[str, Any] = {"nsfw": getattr(result, "nsfw_content_detected", None), "audio": getattr(result, "audio", None)}
        if frames is not None:
            found["videos"] = frames if isinstance(frames, np.ndarray) else np.stack([np.asarray(clip) for clip in frames])
        else:
            found["images"] = np.asarray(result.images)
        return {name: value for name, value in found.items() if name in output or name == "nsfw"}
