"""What a plan that fits says to people: stages with their memory and time, the night's totals, and several cards side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.plan.records import Plan, StagePlan
from batchgen.report.plan_text import plain
from batchgen.report.sheet import Column, Sheet
from batchgen.units import counted, duration_text, size_text


def stages_table(plan: Plan) -> Sheet:
    """Per stage and shape: batch, memory at its peak, what is left, bytes moved a batch, predicted time. One shape is named once, above."""
    shapes = {stage.shape for stage in plan.stages}
    alone = shapes.pop() if len(shapes) == 1 else ""
    columns = (
        Column("stage", keep=0), *(() if alone else (Column("shape", "text", label=""),)), Column("batch", "number", 2),
        Column("weights", "number", 5), Column("activations", "number", 6), Column("peak", "number", 1),
        Column("free", "number", 8, spare=True),
        Column("moved", "number", 7), Column("time", "number", 1),
    )
    table = Sheet(f"Stages at {plain(alone)}" if alone else "Stages", columns, "\n".join(night_lines(plan)))
    available = min(device.available_bytes for device in plan.devices)
    for stage in plan.stages:
        table.add(
            stage.name + (" (tiled)" if stage.tiled else ""), *(() if alone else (stage.shape,)), stage.batch,
            size_text(stage.weights_bytes), size_text(stage.activation_bytes), size_text(stage.peak_bytes),
            size_text(available - stage.peak_bytes), size_text(stage.transfer_bytes),
            "–" if stage.seconds is None else duration_text(stage.seconds),
        )  # fmt: skip
    return table


def night_lines(plan: Plan) -> list[str]:
    """The night in plain lines: time, rate, bytes moved, memory of device and host. Empty where nothing was rehearsed."""
    if not plan.stages:
        return []
    said = plan.predicted
    lines = []
    night = next((dict(decision.numbers) for decision in plan.trail if decision.rule == "predict"), {})
    jobs = int(night.get("jobs") or 0)
    assumed = " (assumed; a manifest or --jobs says how many)" if _assumed(plan) else ""
    if said.seconds is not None and said.seconds > 0:
        rate = f"{jobs / said.seconds * 3600:,.0f} an hour"
        lines.append(f"{counted(jobs, 'job')}{assumed}: {duration_text(said.seconds)}, {rate}, predicted")
    else:
        lines.append(f"{counted(jobs, 'job')}{assumed}; no rates are known for this device, so no time is predicted")
    lines.append(
        f"windows of {plan.window}; {size_text(said.bytes_moved)} moved; peak {size_text(said.peak_device_bytes)} on the device, "
        f"{size_text(said.host_bytes)} in host memory"
    )
    return lines


def _assumed(plan: Plan) -> bool:
    return any(dict(decision.numbers).get("jobs_assumed") for decision in plan.trail if decision.rule == "fit")


@dataclass(frozen=True, slots=True)
class Compared:
    """One card: its plan, or why there is none."""

    card: str
    plan: Plan | None
    refused: str = ""


def compare_table(rows: Sequence[Compared]) -> Sheet:
    """One row a card: placements, batches, predicted time, what limits it."""
    table = Sheet("Cards", (
        Column("card", keep=0), Column("placements", "text", label=""), Column("batches", "text"), Column("peak", "number", 3),
        Column("time", "number", 1), Column("an hour", "number", 2), Column("moved", "number", 4), Column("limited by", "text"),
    ))
    for row in rows:
        if row.plan is None:
            table.add(row.card, "does not fit", "–", "–", "–", "–", "–", row.refused.splitlines()[0] if row.refused else "")
            continue
        plan, said = row.plan, row.plan.predicted
        night = next((dict(decision.numbers) for decision in plan.trail if decision.rule == "predict"), {})
        jobs = int(night.get("jobs") or 0)
        table.add(
            row.card, ", ".join(f"{spot.component} {spot.mode}" for spot in plan.placements),
            ", ".join(f"{stage.name} {stage.batch}" for stage in plan.stages), size_text(said.peak_device_bytes),
            "–" if said.seconds is None else duration_text(said.seconds),
            "–" if not said.seconds else f"{jobs / said.seconds * 3600:,.0f}", size_text(said.bytes_moved), limited_by(plan),
        )  # fmt: skip
    return table


def limited_by(plan: Plan) -> str:
    """What keeps the plan from being faster: weights that move, or the stage that takes longest."""
    streamed = [spot.component for spot in plan.placements if spot.mode == "layerwise-offload"]
    if streamed:
        return f"memory: {', '.join(streamed)} streams from the host"
    moved = [spot.component for spot in plan.placements if spot.mode == "component-offload"]
    longest: StagePlan | None = max((stage for stage in plan.stages if stage.seconds), key=lambda stage: stage.seconds or 0.0, default=None)
    work = f"compute: {longest.name}" if longest is not None else "–"
    return f"{work}; {', '.join(moved)} out between stages" if moved else work
