"""A plan as tables for people: where each component lives and why, and the whole trail.

Cells are `Text`, never markup: names and reasons are data.
"""

from __future__ import annotations

from rich.text import Text

from batchgen.plan.records import Placement, Plan
from batchgen.plan.trail import Number
from batchgen.report.plan_text import summary_lines
from batchgen.report.sheet import Column, Sheet
from batchgen.units import size_text

_STYLES = {"resident": "green", "component-offload": "yellow", "layerwise-offload": "magenta", "fsdp": "cyan"}


def residency_table(plan: Plan) -> Sheet:
    """Per component: group, placement, bytes, who decided and why."""
    columns = (
        Column("component", keep=0), Column("group", keep=9), Column("placement", keep=1), Column("bytes", "number", label=""),
        Column("by", keep=6), Column("why", "text", label=""),
    )
    table = Sheet("Residency", columns, "\n".join(summary_lines(plan)))
    for placement in plan.placements:
        table.add(*_cells(placement))
    return table


def _cells(placement: Placement) -> tuple[Text | str, ...]:
    mode = Text(placement.mode, style=_STYLES[placement.mode])
    return placement.component, placement.group or "–", mode, size_text(placement.bytes), placement.by, placement.reason


def trail_table(plan: Plan) -> Sheet:
    """The whole trail, in order, each decision with the numbers it compared."""
    columns = (
        Column("rule", keep=0), Column("subject", keep=1), Column("decision", keep=2), Column("why", "text", label=""),
        Column("numbers", "text", label=""),
    )
    table = Sheet("Trail", columns)
    for decision in plan.trail:
        numbers = ", ".join(f"{name} {_number(name, value)}" for name, value in decision.numbers)
        table.add(decision.rule, decision.subject, decision.decision.replace(",", ", "), decision.text, numbers)
    return table


def _number(name: str, value: Number) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
