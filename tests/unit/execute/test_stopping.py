"""The clock that ends a night."""

from __future__ import annotations

import time

import pytest

from batchgen.execute import stopping
from batchgen.execute.stopping import Clock, next_time


def local(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M"))


@pytest.mark.parametrize(
    ("now", "clock", "then"),
    [
        ("2026-03-10 22:30", "07:00", "2026-03-11 07:00"),
        ("2026-03-10 06:59", "07:00", "2026-03-10 07:00"),
        ("2026-03-10 07:00", "07:00", "2026-03-11 07:00"),
        ("2026-12-31 23:59", "0:30", "2027-01-01 00:30"),
    ],
)
def test_the_next_time_the_clock_shows_it(now: str, clock: str, then: str) -> None:
    assert next_time(clock, now=local(now)) == local(then)


@pytest.mark.parametrize("clock", ["7", "25:00", "7:60", "tomorrow", ""])
def test_other_forms_are_refused(clock: str) -> None:
    with pytest.raises(ValueError):
        next_time(clock)


def test_a_clock_strikes_by_wall_time_or_by_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, steady = 1000.0, 50.0
    monkeypatch.setattr(stopping.time, "time", lambda: wall)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: steady)
    both = Clock(stop_at=1060.0, max_seconds=30.0)
    assert both.ended_by() is None
    steady = 79.9
    assert both.ended_by() is None
    steady = 80.0
    assert both.ended_by() == "max-hours"
    wall = 1060.0
    assert both.ended_by() == "stop-at"
    assert Clock().ended_by() is None
