"""Tables that stay readable in any width: what does not fit beside the names goes onto lines of its own under its row.

The one place where the product's tables are laid out. Cells are `Text`, never markup: names, reasons and prompts are data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from batchgen.report.plan_text import plain

Kind = Literal["name", "number", "text"]
GAP = 2
LEAST_TEXT = 30  # columns that running text needs to be read beside others
INDENT = 2
_JOINED = "\ue000"  # stands for a blank at which a line must not be broken; private, and one column wide


@dataclass(frozen=True, slots=True)
class Column:
    """`kind`: names and numbers are never broken, running text is. `keep`: columns of the highest leave the table first, text before all.

    `label`: what stands before the value under its row; None: the heading. `spare`: left out where it does not fit, since other columns
    say it too.
    """

    heading: str
    kind: Kind = "name"
    keep: int = 5
    label: str | None = None
    spare: bool = False

    @property
    def said(self) -> str:
        return self.heading if self.label is None else self.label


@dataclass(slots=True)
class Sheet:
    """A table that chooses its layout when it is printed. `caption`: lines under it."""

    title: str
    columns: Sequence[Column]
    caption: str = ""
    header: bool = True
    rows: list[list[Text]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """One row. Text is cleaned of control characters; a `Text` keeps its style."""
        self.rows.append([cell if isinstance(cell, Text) else Text(plain(str(cell))) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inside = self._inside(options.max_width)
        if len(inside) == len(self.columns):
            yield self._table()
        else:
            yield from self._stacked(console, inside, options.max_width)
        for line in self.caption.splitlines():  # in the terminal's width, not in the table's
            yield from _stripped(Text(line, style="table.caption").wrap(console, options.max_width))

    # --- which columns stand side by side -----------------------------------------------------------------------------

    def _natural(self, number: int) -> int:
        """The width at which nothing of a column breaks."""
        head = len(self.columns[number].heading) if self.header else 0
        return max([head, *(row[number].cell_len for row in self.rows)])

    def _inside(self, width: int) -> list[int]:
        """Columns that stand side by side: all of them where running text has room to wrap, else those that need not wrap."""
        inside = list(range(len(self.columns)))
        least = [min(self._natural(number), LEAST_TEXT if column.kind == "text" else width) for number, column in enumerate(self.columns)]
        if sum(least) + GAP * (len(inside) - 1) <= width:
            return inside
        leaving = sorted(inside[1:], key=lambda number: (self.columns[number].kind != "text", -self.columns[number].keep, -number))
        for number in leaving:
            if len(inside) < len(self.columns) and sum(map(self._natural, inside)) + GAP * (len(inside) - 1) <= width:
                break
            inside.remove(number)
        return inside

    # --- the layouts --------------------------------------------------------------------------------------------------

    def _table(self) -> Table:
        table = Table(
            title=Text(self.title) if self.title else None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold",
            header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), show_header=self.header,
        )
        for column in self.columns:
            justify: Literal["left", "right"] = "right" if column.kind == "number" else "left"
            table.add_column(column.heading, justify=justify, overflow="fold", no_wrap=column.kind != "text")
        for row in self.rows:
            table.add_row(*row)
        return table

    def _stacked(self, console: Console, inside: Sequence[int], width: int) -> Iterable[Text]:
        widths = {number: self._natural(number) for number in inside}
        if self.title:
            yield from Text(self.title, style="bold").wrap(console, width)
        if self.header:
            heads = [Text(self.columns[number].heading, style="bold") for number in inside]
            yield from self._line(console, inside, heads, widths, width)
            yield Text("─" * min(width, sum(widths.values()) + GAP * (len(inside) - 1)))
        for row in self.rows:
            yield from self._line(console, inside, [row[number] for number in inside], widths, width)
            outside = [number for number, column in enumerate(self.columns) if number not in inside and not column.spare]
            yield from self._note(console, outside, row, width)

    def _line(
        self, console: Console, inside: Sequence[int], cells: Sequence[Text], widths: dict[int, int], width: int,
    ) -> Iterable[Text]:
        line = Text()
        for place, (number, cell) in enumerate(zip(inside, cells, strict=True)):
            blank, last = " " * (widths[number] - cell.cell_len), place == len(inside) - 1
            number_like = self.columns[number].kind == "number"
            line.append(blank if number_like else "").append_text(cell)
            line.append("" if last else " " * GAP if number_like else blank + " " * GAP)
        # a lone name longer than the terminal is wide
        yield from line.wrap(console, width) if line.cell_len > width else [line]

    def _note(self, console: Console, outside: Sequence[int], row: Sequence[Text], width: int) -> Iterable[Text]:
        note = Text(style="dim")
        for number in outside:
            said, value = self.columns[number].said, row[number]
            if not value.plain or value.plain == "–":
                continue
            note.append("" if not note.plain else " " if note.plain.endswith(".") else "; ")
            note.append(f"{said} " if said else "")
            if self.columns[number].kind == "number":  # and its unit
                value = Text(value.plain.replace(" ", _JOINED), style=value.style, spans=value.spans)
            note.append_text(value)
        if note.plain:
            for line in _stripped(note.wrap(console, max(1, width - INDENT))):
                line.plain = line.plain.replace(_JOINED, " ")
                yield Text.assemble(" " * INDENT, line)


def _stripped(lines: Iterable[Text]) -> Iterable[Text]:
    """Without the blanks at which the text was wrapped."""
    for line in lines:
        line.rstrip()
        yield line
