"""Growth over the night is measured, and only growth replaces a worker."""

from __future__ import annotations

import pytest

from batchgen.events import MemorySample
from batchgen.execute.supervisor import RunResult, WorkerMemory
from batchgen.execute.watch import MemoryWatch
from batchgen.units import GIB


def grown(sizes: list[int], *, limit: int | None = None) -> MemoryWatch:
    """A watch after one sample a window, a minute apart."""
    watch = MemoryWatch(limit)
    for minute, size in enumerate(sizes):
        watch.sample(MemorySample(0, "decode", size, size // 2, size), minute * 60.0)
        watch.window_done()
    return watch


ROWS = {
    "flat": ([8 * GIB] * 9, None, False),
    "grows a little": ([8 * GIB + n * GIB // 4 for n in range(9)], None, False),
    "grows past half as much again": ([16 * GIB + n * 2 * GIB for n in range(9)], None, True),
    "small ones may grow by 4 GiB": ([GIB + n * GIB // 3 for n in range(12)], None, False),
    "past the user's mark": ([3 * GIB, 3 * GIB, 5 * GIB], 4 * GIB, True),
    "above the user's mark from the start": ([5 * GIB] * 9, 4 * GIB, False),
    "not settled yet": ([GIB, 50 * GIB], None, False),
}


@pytest.mark.parametrize(("sizes", "limit", "outgrown"), ROWS.values(), ids=ROWS.keys())
def test_who_is_replaced(sizes: list[int], limit: int | None, outgrown: bool) -> None:
    assert grown(sizes, limit=limit).outgrown is outgrown


def test_the_slope_is_that_of_the_line_after_settling() -> None:
    watch = grown([GIB, 2 * GIB, *(3 * GIB + n * 1_000_000 for n in range(20))])
    assert watch.slope_bytes_per_hour == pytest.approx(60_000_000, rel=1e-6)


@pytest.mark.parametrize("windows", [4, 11], ids=["few", "over a short time"])
def test_too_little_has_no_slope(windows: int) -> None:
    assert grown([GIB + n * 2**20 for n in range(windows)]).slope_bytes_per_hour is None


def test_peaks_are_kept() -> None:
    watch = grown([4, 10, 6])
    assert (watch.rss_bytes, watch.rss_peak_bytes, watch.device_bytes, watch.device_peak_bytes) == (6, 10, 3, 10)


def test_a_slope_is_told_where_it_matters() -> None:
    counts = dict.fromkeys(("pending", "running", "done", "failed", "filtered", "vanished"), 0)

    def lines(slope: float | None, rss: int) -> list[str]:
        return RunResult(counts, None, 1.0, 0, memory=(WorkerMemory(0, rss, rss, 0, slope),)).lines

    assert lines(3.0 * GIB, 8 * GIB) == ["worker 0 grew by 3.00 GiB an hour, to 8.00 GiB"]
    assert lines(0.5 * GIB, GIB) == lines(2.0 * GIB, 40 * GIB) == lines(-5.0 * GIB, GIB) == lines(None, GIB) == []
