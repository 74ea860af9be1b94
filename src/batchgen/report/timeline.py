"""The night as lines over time: what each worker did when, its memory, and outputs a minute. Pure; memory grows with slices, not jobs.

Time is time of rendering: a folder whose runs lie a day apart shows them end to end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from batchgen.journalreader import Work

# Slices of the night: more than a screen has pixels to tell apart is waste.
POINTS = 60
LANE_POINTS = 300
LOADING, MOVING = "loading weights", "moving weights"


@dataclass(frozen=True, slots=True)
class Axis:
    """Runs as (beginning, end), epoch seconds, oldest first, none beside another, put end to end."""

    runs: tuple[tuple[float, float], ...]

    @classmethod
    def over(cls, spans: Iterable[tuple[float, float]]) -> Axis:
        """Of runs in any order: those that went on at one time, as shards do, are one stretch of it."""
        found: list[tuple[float, float]] = []
        for begin, end in sorted(spans):
            if found and begin < found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], end))
            else:
                found.append((begin, end))
        return cls(tuple(found))

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self.runs)

    def at(self, when: float) -> float:
        """Seconds of rendering before `when`; a moment between two runs counts as the first one's end."""
        number = bisect_right(self.runs, when, key=lambda run: run[0])
        if number == 0:
            return 0.0
        before = sum(end - begin for begin, end in self.runs[: number - 1])
        begin, end = self.runs[number - 1]
        return before + min(when, end) - begin

    @property
    def joints(self) -> tuple[float, ...]:
        """Where a later run begins, in hours."""
        found, total = [], 0.0
        for begin, end in self.runs[:-1]:
            total += end - begin
            found.append(total / 3600)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Series:
    """A line over time: x in hours of rendering."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker: for each stage (and for loading and moving weights) its share of every slice of the night, 0 to 1."""

    worker: int
    slice_hours: float
    shares: tuple[tuple[str, tuple[float, ...]], ...]


def rate(times: Iterable[float], axis: Axis, count: int) -> Series:
    """Outputs a minute over equal slices, as many as `count` outputs have something to say for."""
    name = "outputs a minute"
    slices = min(POINTS, count // 2)
    if slices < 2 or axis.seconds <= 0:
        return Series(name, ())
    width = axis.seconds / slices
    found = [0] * slices
    for when in times:
        found[min(slices - 1, int(axis.at(when) / width))] += 1
    return Series(name, tuple(((number + 0.5) * width / 3600, made * 60 / width) for number, made in enumerate(found)))


def memory(rows: Iterable[tuple[float, int, int, int]], axis: Axis) -> tuple[Series, ...]:
    """Per worker the highest host and device memory in each slice, in GiB. Rows: (when, worker, resident bytes, device bytes)."""
    if axis.seconds <= 0:
        return ()
    width = axis.seconds / POINTS
    highest: dict[str, dict[int, float]] = {}
    for when, worker, resident, device in rows:
        place = min(POINTS - 1, int(axis.at(when) / width))
        for name, size in ((f"host, worker {worker}", resident), (f"device, worker {worker}", device)):
            if size:
                slot = highest.setdefault(name, {})
                slot[place] = max(slot.get(place, 0.0), size / 2**30)
    return tuple(
        Series(name, tuple(((place + 0.5) * width / 3600, size) for place, size in sorted(slots.items())))
        for name, slots in sorted(highest.items())
    )


def lanes(rows: Iterable[Work], axis: Axis) -> tuple[Lane, ...]:
    """What each worker did when. Stages in the order in which they first ended, weights after them."""
    if axis.seconds <= 0:
        return ()
    width = axis.seconds / LANE_POINTS
    busy: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        name = {"load": LOADING, "move": MOVING}.get(row.kind, row.name)
        slots = busy.setdefault(row.worker, {}).setdefault(name, [0.0] * LANE_POINTS)
        end = axis.at(row.at)
        _spread(slots, max(0.0, end - row.seconds), end, width)
    order = _order([name for stages in busy.values() for name in stages])
    return tuple(
        Lane(worker, width / 3600, tuple((name, _shares(stages[name], width)) for name in order if name in stages))
        for worker, stages in sorted(busy.items())
    )


def _shares(seconds: Iterable[float], width: float) -> tuple[float, ...]:
    return tuple(min(1.0, part / width) for part in seconds)


def _spread(slots: list[float], begin: float, end: float, width: float) -> None:
    """Adds the seconds from `begin` to `end` to the slices that they fall into."""
    last = len(slots) - 1
    for number in range(min(last, int(begin / width)), min(last, int(end / width)) + 1):
        # the last slice takes what rounding leaves beyond it
        upper = end if number == last else min(end, (number + 1) * width)
        slots[number] += max(0.0, upper - max(begin, number * width))


def _order(names: Iterable[str]) -> list[str]:
    known = dict.fromkeys(names)
    weights = [name for name in (LOADING, MOVING) if name in known]
    return [name for name in known if name not in weights] + weights
