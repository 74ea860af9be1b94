"""A plan as tables for people: where each component lives and why, and the whole trail.

Cells are `Text`, never markup: names and reasons are data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from batchgen.plan.records import Placement, Plan
from batchgen.plan.trail import Number
from batchgen.report.plan_text import plain, summary_lines
from batchgen.units import size_text

_STYLES = {"resident": "green", "component-offload": "yellow", "layerwise-offload": "magenta", "fsdp": "cyan"}


def residency_table(plan: Plan) -> Table:
    """Per component: group, placement, bytes, who decided and why."""
    table = _table("Residency", ("component", "group", "placement", "bytes", "by", "why"))
    table.columns[3].justify = "right"
    for placement in plan.placements:
        _row(table, _cells(placement))
    table.caption = Text("\n".join(summary_lines(plan)))
    return table


def _cells(placement: Placement) -> tuple[Text | str, ...]:
    mode = Text(placement.mode, style=_STYLES[placement.mode])
    return placement.component, placement.group or "–", mode, size_text(placement.bytes), placement.by, placement.reason


def trail_table(plan: Plan) -> Table:
    """The whole trail, in order, each decision with the numbers it compared."""
    table = _table("Trail", ("rule", "subject", "decision", "why", "numbers"))
    for decision in plan.trail:
        numbers = ", ".join(f"{name} {_number(name, value)}" for name, value in decision.numbers)
        _row(table, (decision.rule, decision.subject, decision.decision.replace(",", ", "), decision.text, numbers))
    return table


def _number(name: str, value: Number) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(
        title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", header_style="bold", caption_justify="left",
        show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("component", "placement", "bytes", "by"))
    return table


def _row(table: Table, cells: Iterable[Text | str]) -> None:
    table.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in cells))
