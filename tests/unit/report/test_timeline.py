"""The night as lines over time: pauses left out, time shared out to slices, nothing lost at their edges."""

from __future__ import annotations

import pytest

from batchgen.journalreader import Work
from batchgen.report.timeline import LANE_POINTS, LOADING, MOVING, Axis, lanes, memory, rate

NIGHTS = Axis(((1000.0, 4600.0), (90_000.0, 97_200.0)))  # an hour, and two hours a day later


def work(at: float, seconds: float, name: str = "denoise", *, worker: int = 0, kind: str = "batch") -> Work:
    return Work(1, at, worker, kind, name, "64x64", 0, seconds, 1, 1)


MOMENTS = [
    ("the beginning", 1000.0, 0.0), ("within the first run", 2800.0, 1800.0), ("a pause counts as the end before it", 50_000.0, 3600.0),
    ("the second run follows at once", 90_000.0, 3600.0), ("its end", 97_200.0, 10_800.0), ("before everything", 5.0, 0.0),
]


@pytest.mark.parametrize(("when", "expected"), [row[1:] for row in MOMENTS], ids=[row[0] for row in MOMENTS])
def test_time_of_rendering(when, expected):
    assert NIGHTS.at(when) == expected
    assert (NIGHTS.seconds, NIGHTS.joints) == (10_800.0, (1.0,))


def test_every_second_of_a_batch_stands_in_some_slice():
    axis = Axis(((0.0, 1000.0),))
    rows = [work(100.0, 70.3), work(103.0, 0.01), work(1000.0, 250.0), work(700.0, 30.0, "decode")]
    (lane,) = lanes(rows, axis)
    width = 1000.0 / LANE_POINTS
    sums = {name: sum(shares) * width for name, shares in lane.shares}
    assert sums["denoise"] == pytest.approx(320.31)
    assert sums["decode"] == pytest.approx(30.0)


def test_a_batch_that_began_before_its_run_does_not_reach_into_another():
    (lane,) = lanes([work(91_000.0, 5000.0)], NIGHTS)
    ((_, shares),) = lane.shares
    assert sum(shares) * NIGHTS.seconds / LANE_POINTS == pytest.approx(4600.0)  # all that there was before, 1000 s of this run and an hour
    assert max(shares) <= 1.0


def test_workers_have_lanes_of_their_own_and_weights_come_last():
    axis = Axis(((0.0, 100.0),))
    rows = [work(5, 5, "vae", kind="load"), work(6, 1, "vae", kind="move"), work(20, 10), work(30, 5, "decode"), work(20, 10, worker=1)]
    found = lanes(rows, axis)
    assert [(lane.worker, [name for name, _ in lane.shares]) for lane in found] == [
        (0, ["denoise", "decode", LOADING, MOVING]), (1, ["denoise"]),
    ]


def test_more_at_once_than_time_allows_is_cut_to_the_whole_slice():
    (lane,) = lanes([work(50, 50), work(50, 50)], Axis(((0.0, 100.0),)))
    assert max(lane.shares[0][1]) == 1.0


def test_rates_count_every_output_over_time_of_rendering():
    times = [1000.0 + 60 * number for number in range(60)] + [90_000.0 + 30 * number for number in range(240)]
    found = rate(times, NIGHTS, len(times))
    width = NIGHTS.seconds / 60 / len(found.points)
    assert sum(y for _, y in found.points) * width == pytest.approx(300)
    assert found.points[2][1] == pytest.approx(1.0)
    assert found.points[-2][1] == pytest.approx(2.0)
    assert rate(times[:1], NIGHTS, 1).points == ()


def test_memory_keeps_the_highest_of_a_slice_and_names_workers():
    rows = [(1000.0, 0, 2**30, 0), (1001.0, 0, 3 * 2**30, 2**30), (97_000.0, 1, 2**30, 0)]
    found = {line.name: line.points for line in memory(rows, NIGHTS)}
    assert list(found) == ["device, worker 0", "host, worker 0", "host, worker 1"]
    assert [y for _, y in found["host, worker 0"]] == [3.0]


def test_runs_side_by_side_are_one_stretch_of_the_night():
    shards = Axis.over([(1000.0, 4600.0), (90_000.0, 97_200.0), (1100.0, 4000.0), (4500.0, 5000.0)])
    assert shards.runs == ((1000.0, 5000.0), (90_000.0, 97_200.0))
    assert shards.seconds == 4000.0 + 7200.0
    assert shards.at(2000.0) == 1000.0
    assert Axis.over(reversed(NIGHTS.runs)) == NIGHTS


@pytest.mark.parametrize("axis", [Axis(()), Axis(((5.0, 5.0),))], ids=["no run", "a run of no time"])
def test_nothing_is_drawn_where_no_time_passed(axis):
    assert lanes([work(5.0, 0.0)], axis) == ()
    assert memory([(5.0, 0, 1, 1)], axis) == ()
    assert rate([5.0] * 10, axis, 10).points == ()
