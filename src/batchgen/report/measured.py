"""What a folder's runs measured, added up over its resumes: RUN/tables/measured.json, for the report of the morning after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from batchgen.outputs.files import atomic_write
from batchgen.plan.records import Plan
from batchgen.report.advice import advice
from batchgen.report.summary import Summary
from batchgen.report.tables import predicted_per_job
from batchgen.runfolder import RunFolder

_NAME = "measured.json"
# Of a merged folder, beside the sums of both: a merge that is repeated replaces the one and leaves the other.
_MERGED, _OWN = "of_shards", "of_own_runs"
# Highest of all runs instead of their sum.
_PEAKS = frozenset({"largest_batch", "peak_bytes", "peak_device_bytes", "peak_host_bytes"})


def read_measured(folder: RunFolder) -> dict[str, Any]:
    """What earlier runs of the folder left, its shards' included; empty where there is nothing or it cannot be read."""
    try:
        found = json.loads((folder.tables / _NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def add_measured(folder: RunFolder, plan: Plan, summary: Summary) -> None:
    """Adds one run's sums to the folder's. Raises DiskError."""
    before, run = read_measured(folder), as_record(plan, summary)
    if _MERGED in before:
        _write(folder, _with_shards(_part(before, _MERGED), added(_part(before, _OWN), run)))
    else:
        _write(folder, added(before, run))


def add_up(folder: RunFolder, parts: Mapping[str, RunFolder]) -> None:
    """Makes a merged folder's sums those of its shards, by their names, and of its own runs. Shards merged before and not named now stay.

    Raises DiskError.
    """
    before = read_measured(folder)
    own = _part(before, _OWN) if _MERGED in before else before  # a killed merge left no sums: then a run's stand alone
    shards = {**_part(before, _MERGED), **{name: read_measured(part) for name, part in parts.items()}}
    _write(folder, _with_shards(shards, own))


def _with_shards(shards: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for part in (*shards.values(), own):
        total = added(total, part)
    return {**total, _MERGED: dict(shards), _OWN: dict(own)}


def _part(measured: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = measured.get(name)
    return found if isinstance(found, Mapping) else {}


def _write(folder: RunFolder, total: Mapping[str, Any]) -> None:
    atomic_write(folder.tables / _NAME, json.dumps(total, ensure_ascii=False, indent=1).encode(), overwrite=True)


def as_record(plan: Plan, summary: Summary) -> dict[str, Any]:
    """One run's sums as plain values. What was predicted stands beside it where the plan's rehearsal gave any."""
    stages = {name: asdict(use) for name, use in summary.stages.items()}
    seconds = predicted_per_job(plan)
    for name, use in stages.items():
        if summary.stage_peaks.get(name):
            use["peak_bytes"] = summary.stage_peaks[name]
        if name in seconds:
            use["predicted_seconds_a_job"] = seconds[name]
        if found := [stage.peak_bytes for stage in plan.stages if stage.name == name]:
            use["predicted_peak_bytes"] = max(found)
    return {
        "components": {name: asdict(use) for name, use in summary.components.items()},
        "stages": stages,
        "advice": advice(summary, plan),
        "peak_device_bytes": summary.peak_device_bytes, "peak_host_bytes": summary.peak_host_bytes,
    }


def added(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of the same name summed (peaks: the higher one), tables joined, all else from the newer."""
    total = dict(old)
    for name, value in new.items():
        before = total.get(name)
        if isinstance(value, Mapping):
            total[name] = added(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and isinstance(before, int | float):
            total[name] = max(before, value) if name in _PEAKS or name.startswith("predicted") else before + value
        else:
            total[name] = value
    return total
