"""What finished runs on this machine have shown: the share of a device's rate that each stage reaches, by device and pipeline class.

One JSON file beside the rehearsals. A damaged file is an empty one. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from batchgen.plan.records import Plan

# New runs count as much as all before them, so that a driver's update shows after a night or two.
_WEIGHT = 0.5
_SENSIBLE = (0.005, 1.0)


def efficiencies(cache: Path, device: str, family: str) -> dict[str, float]:
    """Stage -> share of the dense bf16 rate."""
    known = _read(cache).get(device, {}).get(family, {})
    return {str(stage): float(value) for stage, value in known.items() if _SENSIBLE[0] <= float(value) <= _SENSIBLE[1]}


def learn(cache: Path, device: str, family: str, shown: Mapping[str, float]) -> None:
    """Takes a run's efficiencies in. A cache that cannot be written costs only the lesson."""
    content = _read(cache)
    stages = content.setdefault(device, {}).setdefault(family, {})
    for stage, value in shown.items():
        if _SENSIBLE[0] <= value <= _SENSIBLE[1]:
            before = stages.get(stage)
            stages[stage] = value if before is None else (1 - _WEIGHT) * float(before) + _WEIGHT * value
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        part = cache / "efficiency.json.part"
        part.write_text(json.dumps(content, indent=1), encoding="utf-8")
        part.replace(cache / "efficiency.json")


def shown_by(plan: Plan, rate_flops: float, seconds: Mapping[str, float], rows: Mapping[str, int]) -> dict[str, float]:
    """Efficiencies of a finished run: `seconds` of compute and `rows` done by stage, against the plan's FLOPs."""
    found = {}
    for stage in plan.stages:
        done, took = rows.get(stage.name, 0), seconds.get(stage.name, 0.0)
        if done and took > 0:
            found[stage.name] = stage.flops / stage.batch * done / (took * rate_flops)
    return found


def _read(cache: Path) -> dict[str, dict[str, dict[str, float]]]:
    try:
        content = json.loads((cache / "efficiency.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
