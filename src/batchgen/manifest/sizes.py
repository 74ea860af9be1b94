"""Sizes and frame counts against a model's own rules, and the nearest that it can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen.errors import UsageError
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


def option_refusal(
    found: Sequence[Misfit], size: tuple[object, object] | None, *, frames_option: str = "--num-frames", snap: bool = True,
) -> UsageError:
    """The error for options that ask for what the model cannot make. `size`: width and height where --size said both; `snap`: may be
    offered. Every side that does not fit is named, and every option by the name it was said with."""
    sides = [misfit for misfit in found if misfit.field != "num_frames"]
    said, options, near = [], [], []
    if size is not None and sides:
        wrong = ", ".join(f"{misfit.field} {misfit.rule}" for misfit in sides)
        if len(sides) == 2 and sides[0].rule == sides[1].rule:
            wrong = f"width and height {sides[0].rule.replace('is not a multiple', 'are not multiples')}"
        said.append(f"--size {size[0]}x{size[1]}: {wrong}")
        options.append("--size")
        nearest = {misfit.field: misfit.nearest for misfit in sides}
        ways = range(min(len(values) for values in nearest.values()))
        pairs = [
            [nearest[field][way] if field in nearest else own for field, own in zip(("width", "height"), size, strict=True)] for way in ways
        ]
        near.append([f"{width}x{height}" for width, height in pairs])
        found = [misfit for misfit in found if misfit.field == "num_frames"]
    for misfit in found:
        option = frames_option if misfit.field == "num_frames" else f"--{misfit.field}"
        said.append(f"{option} {misfit.value} {misfit.rule}")
        options.append(option)
        near.append([str(value) for value in misfit.nearest])
    alone = len(options) == 1
    fixes = [("" if alone else f"{option} ") + " or ".join(values) for option, values in zip(options, near, strict=True)]
    fix = f"Take {', '.join(fixes)}" + (f"; --snap takes {', '.join(values[0] for values in near)}." if snap else ".")
    return UsageError("; ".join(said), option=options[0], hint=fix)


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
