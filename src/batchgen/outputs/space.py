"""Will the disk hold the night? Sizes of outputs before any is made, from their pixels.

Rates are upper ends of what pictures of diffusion models take, so that a warning comes too soon rather than too late; as soon as a
run has outputs of its own, their mean counts instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchgen.jobs import Job
from batchgen.units import counted, size_text

# Bytes a pixel. PNG: photographs of a megapixel take 1.2 to 2 bytes, noise 3; the others at the qualities written here.
_BYTES_PER_PIXEL = {"png": 2.0, "jpeg": 0.7, "webp": 0.5, "avif": 0.4, "mp4": 0.25}
_METADATA_BYTES = 4096
_DEFAULT_SIDE = 1024  # where neither row nor options say
_SAMPLE = 10_000


@dataclass(frozen=True, slots=True)
class SpaceForecast:
    """Bytes that the outputs still to come are expected to take, and what the file system has free for this user."""

    needed_bytes: int
    free_bytes: int
    jobs: int
    measured: bool  # from this run's own outputs

    @property
    def enough(self) -> bool:
        return self.needed_bytes <= self.free_bytes

    @property
    def warning(self) -> str | None:
        """What to tell before the night, where the disk will not hold it."""
        if self.enough:
            return None
        by = "going by this run's outputs so far" if self.measured else "going by their sizes"
        need = counted(self.jobs, "output is to come and needs", "outputs are to come and need")
        return (
            f"{need} about {size_text(self.needed_bytes)}, {by}, and {size_text(self.free_bytes)} are free: "
            "the run will stop in good order when the disk is full, and go on when there is space"
        )


def output_bytes(job: Job, image_format: str, video_format: str) -> int:
    """Expected size of one output."""
    pixels = (job.width or _DEFAULT_SIDE) * (job.height or _DEFAULT_SIDE) * (job.num_frames or 1)
    kind = image_format if job.num_frames is None else video_format
    return round(pixels * _BYTES_PER_PIXEL[kind]) + _METADATA_BYTES


def forecast(
    jobs: Iterable[Job], count: int, folder: Path, *, image_format: str = "png", video_format: str = "mp4", mean_bytes: float | None = None
) -> SpaceForecast:
    """Space for `count` outputs to come in `folder` (or where it will be made).

    `jobs` gives their sizes; the first ten thousand stand for the rest. `mean_bytes`: what outputs of this run took so far.
    """
    if mean_bytes is not None:
        return SpaceForecast(round(mean_bytes * count), free_bytes(folder), count, True)
    total = seen = 0
    for job in jobs:
        total += output_bytes(job, image_format, video_format)
        seen += 1
        if seen == _SAMPLE:
            break
    return SpaceForecast(total * count // seen if seen else 0, free_bytes(folder), count, False)


def free_bytes(folder: Path) -> int:
    """Free on the file system of `folder` or of the nearest folder above that exists, for this user."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize
