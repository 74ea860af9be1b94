"""What products hold in memory on their way to a file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from batchgen.events import Event, OutputDone
from batchgen.execute.guidance import JobGuidance
from batchgen.execute.products import Products
from batchgen.execute.settings import OutputSettings
from batchgen.execute.windows import Row
from batchgen.jobs import Job

SIDE = 128
FRAME_BYTES = SIDE * SIDE * 3 * 4  # as float32


def encoding_peak(folder: Path, kind: str, frames: int) -> int:
    """Bytes that writing a clip takes at its highest beside the clip itself, as Python and numpy allocate them."""
    output = "x" if kind == "png" else f"x.{kind}"
    job = Job("k" * 32, 0, 2, 0, "x", "x", None, 1, "row", output, width=SIDE, height=SIDE, num_frames=frames, fps=8.0)
    clip = np.linspace(0, 1, frames, dtype=np.float32)[:, None, None, None] + np.zeros((1, SIDE, SIDE, 3), np.float32)
    heard: list[Event] = []
    products = Products(0, OutputSettings(str(folder), video_format=kind), heard.append)
    tracemalloc.start()
    try:
        products.take(Row(job, JobGuidance(False, None)), clip, {"fps": 8.0})
        products.finish()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        products.close()
    assert [type(event) for event in heard] == [OutputDone]
    return peak


@pytest.mark.parametrize("kind", ["mp4", "webp", "png"])
def test_encoding_takes_a_few_frames_of_memory_however_long_the_clip(kind: str, tmp_path: Path) -> None:
    encoding_peak(tmp_path / "first", kind, 2)  # what is loaded and cached at first use
    short, long = (encoding_peak(tmp_path / str(frames), kind, frames) for frames in (10, 80))
    assert long <= short + FRAME_BYTES
    assert long <= 8 * FRAME_BYTES
