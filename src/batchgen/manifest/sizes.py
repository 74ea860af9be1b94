"""Sizes and frame counts against a model's own rules, and the nearest that it can make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchgen.inventory.records import SizeRules


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value the model cannot make, with its legal neighbours, nearest first."""

    field: str
    value: int
    rule: str
    nearest: tuple[int, ...]


def misfits(values: Mapping[str, object], rules: SizeRules | None) -> list[Misfit]:
    """What among width, height and num_frames breaks the rules. Unknown rules are kept by everything."""
    if rules is None:
        return []
    found = []
    for field, step, offset in (
        ("width", rules.width_multiple, 0), ("height", rules.height_multiple, 0), ("num_frames", rules.frames_step, rules.frames_offset),
    ):
        value = values.get(field)
        if step is None or step < 1 or not isinstance(value, int) or (value >= max(offset, 1) and (value - offset) % step == 0):
            continue
        found.append(Misfit(field, value, _rule(field, step, offset, rules.source), neighbours(value, step, offset)))
    return found


def neighbours(value: int, step: int, offset: int = 0) -> tuple[int, ...]:
    """The legal values step * n + offset around `value`, above 0, nearest first; of two equally near the larger first."""
    below = (value - offset) // step * step + offset
    legal = [number for number in (below, below + step) if number > 0]
    if not legal:
        legal = [below + step * (1 + (-below) // step)]
    return tuple(sorted(legal, key=lambda number: (abs(number - value), -number)))


def _rule(field: str, step: int, offset: int, source: str) -> str:
    why = f" ({source})" if source else ""
    if field == "num_frames":
        return f"is not {step}n+{offset}{why}" if offset else f"is not a multiple of {step}{why}"
    return f"is not a multiple of {step}{why}"
