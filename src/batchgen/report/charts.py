"""Charts of a report as SVG pictures, drawn by matplotlib's object interface (no global state). Knows numbers and labels, not runs."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from batchgen.report.data import Series

# Legible on white and on dark paper alike: the page's colour scheme does not reach into a picture.
_INK, _GRID = "#808080", "#80808040"
_COLOURS = ("#3b7dd8", "#e08a1e", "#3a9a5c", "#b5479c", "#c94a3b", "#6f6fd0", "#5b8a8a", "#8a7a3b")
_MARGIN_HOURS = 2.0


def line_chart(title: str, series: Sequence[Series], unit: str) -> str:
    """Lines over time as a data URI of an SVG; an empty text where there is nothing to draw."""
    drawn = [line for line in series if len(line.points) > 1]
    if not drawn:
        return ""
    hours = max(point[0] for line in drawn for point in line.points)
    # A run of minutes reads better in minutes.
    scale, word = (60.0, "minutes") if hours < _MARGIN_HOURS else (1.0, "hours")
    figure, axes = _axes(title, height=2.7)
    for number, line in enumerate(drawn):
        x, y = zip(*line.points, strict=True)
        axes.plot([value * scale for value in x], y, label=line.name, color=_COLOURS[number % len(_COLOURS)], linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(word, color=_INK)
    axes.set_ylabel(unit, color=_INK)
    if len(drawn) > 1:
        axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
    return _uri(figure)


def share_chart(title: str, shares: Mapping[str, float], unit: str) -> str:
    """One stacked bar of what took how much; an empty text where all is zero."""
    if not any(shares.values()):
        return ""
    figure, axes = _axes(title, height=1.6)
    left = 0.0
    total = sum(shares.values())
    for number, (name, value) in enumerate(shares.items()):
        label = f"{name} {100 * value / total:.0f} %"
        axes.barh([0], [value], left=left, label=label, color=_COLOURS[number % len(_COLOURS)])
        left += value
    axes.set_yticks([])
    axes.set_xlabel(unit, color=_INK)
    axes.legend(frameon=False, labelcolor=_INK, fontsize=8, ncols=min(4, len(shares)), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.set_title("")
    axes.text(0, 1.32, title, transform=axes.transAxes, color=_INK, fontsize=10)
    return _uri(figure)


def _axes(title: str, *, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.6, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=_INK, fontsize=10)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.grid(visible=True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GRID)
    return figure, axes


def _uri(figure: Figure) -> str:
    # As a picture: scripts and styles inside an <img> are dead, so nothing of it can act in the page.
    buffer = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
