"""What more devices bring: the list's predicted time and rate on one replica, on two, on all. Pure numbers.

The last windows are shared out, so a replica gets its share of the jobs, rounded up. Loading is left out: it depends on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.plan.records import ScalingPoint
from batchgen.plan.search import Candidate, Night, night_seconds
from batchgen.plan.trail import Decision, Number

_ALL_UP_TO = 8  # replicas; of more, each doubling and all


def scaling(found: Candidate, night: Night, devices: int, group_size: int) -> tuple[ScalingPoint, ...]:
    """From one replica (or group) to as many as the devices make; empty where no rates are known."""
    most = devices // group_size
    counts = range(1, most + 1) if most <= _ALL_UP_TO else sorted({2**power for power in range(most.bit_length())} | {most})
    points = []
    for replicas in counts:
        seconds = night_seconds(found, night, replicas)
        if seconds is None or seconds <= 0:
            return ()
        points.append(ScalingPoint(replicas * group_size, replicas, seconds, night.workload.jobs / seconds * 3600))
    return tuple(points)


def scaling_decision(points: Sequence[ScalingPoint], group_size: int) -> Decision:
    """All points, as people and programs read them."""
    numbers: dict[str, Number] = {f"jobs_per_hour_{point.devices}": round(point.jobs_per_hour, 3) for point in points}
    text = f"Predicted an hour, on {'devices' if group_size == 1 else f'devices in groups of {group_size}'}: {scaling_text(points)}."
    return Decision.of("scaling", "night", str(points[-1].replicas), text, numbers)


def scaling_text(points: Sequence[ScalingPoint]) -> str:
    """`1: 62, 2: 124`: devices and outputs an hour."""
    return ", ".join(f"{point.devices}: {rate_text(point.jobs_per_hour)}" for point in points)


def rate_text(an_hour: float) -> str:
    return f"{an_hour:,.0f}" if an_hour >= 10 else f"{an_hour:.2g}"
