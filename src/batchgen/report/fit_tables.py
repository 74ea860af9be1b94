"""What a plan that fits says to people: stages with their memory and time, the night's totals, and several cards side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from batchgen.plan.records import Plan, StagePlan
from batchgen.report.plan_text import plain
from batchgen.units import duration_text, size_text


def stages_table(plan: Plan) -> Table:
    """Per stage and shape: batch, memory at its peak, what is left, bytes moved a batch, predicted time."""
    table = _table("Stages", ("stage", "shape", "batch", "weights", "activations", "peak", "free", "moved a batch", "time"))
    available = min(device.available_bytes for device in plan.devices)
    for stage in plan.stages:
        _row(table, (
            stage.name + (" (tiled)" if stage.tiled else ""), stage.shape, str(stage.batch), size_text(stage.weights_bytes),
            size_text(stage.activation_bytes), size_text(stage.peak_bytes), size_text(available - stage.peak_bytes),
            size_text(stage.transfer_bytes), "–" if stage.seconds is None else duration_text(stage.seconds),
        ))  # fmt: skip
    table.caption = Text("\n".join(night_lines(plan)))
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
        lines.append(f"{jobs} jobs{assumed}: {duration_text(said.seconds)}, {jobs / said.seconds * 3600:.0f} an hour, predicted")
    else:
        lines.append(f"{jobs} jobs{assumed}; no rates are known for this device, so no time is predicted")
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


def compare_table(rows: Sequence[Compared]) -> Table:
    """One row a card: placements, batches, predicted time, what limits it."""
    table = _table("Cards", ("card", "placements", "batches", "peak", "time", "an hour", "moved", "limited by"))
    for row in rows:
        if row.plan is None:
            _row(table, (row.card, "does not fit", "–", "–", "–", "–", "–", row.refused.splitlines()[0] if row.refused else ""))
            continue
        plan, said = row.plan, row.plan.predicted
        night = next((dict(decision.numbers) for decision in plan.trail if decision.rule == "predict"), {})
        jobs = int(night.get("jobs") or 0)
        _row(table, (
            row.card, ", ".join(f"{spot.component} {spot.mode}" for spot in plan.placements),
            ", ".join(f"{stage.name} {stage.batch}" for stage in plan.stages), size_text(said.peak_device_bytes),
            "–" if said.seconds is None else duration_text(said.seconds),
            "–" if not said.seconds else f"{jobs / said.seconds * 3600:.0f}", size_text(said.bytes_moved), limited_by(plan),
        ))  # fmt: skip
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


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(
        title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", header_style="bold", caption_justify="left",
        show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="left" if heading in _WORDS else "right")
    return table


_WORDS = frozenset({"stage", "shape", "card", "placements", "batches", "limited by"})


def _row(table: Table, cells: Sequence[str]) -> None:
    table.add_row(*(Text(plain(cell)) for cell in cells))
