"""Charts of a report as SVG pictures, drawn by matplotlib's object interface (no global state). Knows numbers and labels, not runs."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from batchgen.report.timeline import LOADING, MOVING, Lane, Series

# Legible on white and on dark paper alike: the page's colour scheme does not reach into a picture.
_INK, _GRID = "#808080", "#80808040"
_COLOURS = ("#3b7dd8", "#e08a1e", "#3a9a5c", "#b5479c", "#c94a3b", "#6f6fd0", "#5b8a8a", "#8a7a3b")
_WEIGHTS = {LOADING: "#a0a0a0", MOVING: "#c8b48a"}
_MINUTES_BELOW_HOURS = 2.0  # a run of minutes reads better in minutes
_SECONDS_BELOW_HOURS = 0.1
LANES_SHOWN = 16
LINES_SHOWN = 8


def night_chart(lanes: Sequence[Lane], memory: Sequence[Series], rate: Series, *, hours: float, joints: Sequence[float] = ()) -> str:
    """What ran when, memory and outputs a minute over one axis of `hours`, as a data URI of an SVG; empty where nothing is known.

    `joints`: hours at which a later run begins.
    """
    lines = [line for line in memory if len(line.points) > 1][:LINES_SHOWN]
    shown = lanes[:LANES_SHOWN]
    heights = [max(0.5, 0.32 * len(shown))] * bool(shown) + [1.5] * bool(lines) + [1.5] * (len(rate.points) > 1)
    if not heights or hours <= 0:
        return ""
    figure = Figure(figsize=(8.6, sum(heights) + 0.62 * len(heights) + 0.3), layout="constrained")
    FigureCanvasSVG(figure)
    scale, unit = _time_unit(hours)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    places = iter(grid)
    if shown:
        _draw_lanes(next(places), shown, scale, len(lanes) - len(shown))
    if lines:
        _draw_lines(next(places), "Memory", [_broken(line, joints) for line in lines], "GiB", scale)
    if len(rate.points) > 1:
        axes = next(places)
        _style(axes, "Outputs a minute")
        width = (rate.points[1][0] - rate.points[0][0]) * scale
        axes.bar([x * scale for x, _ in rate.points], [y for _, y in rate.points], width=width, color=_COLOURS[0], linewidth=0)
    for axes in grid:
        axes.set_xlim(0, hours * scale)
        for joint in joints:
            axes.axvline(joint * scale, color=_INK, linewidth=0.8, linestyle=(0, (3, 3)))
    word = f"{unit} of rendering" + ("; a dashed line is where a run was resumed" if joints else "")
    grid[-1].set_xlabel(word, color=_INK, fontsize=9)
    return _uri(figure)


def share_chart(title: str, shares: Mapping[str, float], unit: str) -> str:
    """One stacked bar of what took how much; an empty text where all is zero."""
    total = sum(shares.values())
    if not total:
        return ""
    figure = Figure(figsize=(8.6, 1.35), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    _style(axes, title)
    left = 0.0
    for number, (name, value) in enumerate(shares.items()):
        label = f"{name} {100 * value / total:.0f} %"
        axes.barh([0], [value], left=left, label=label, color=_WEIGHTS.get(name, _COLOURS[number % len(_COLOURS)]), linewidth=0)
        left += value
    axes.set_xlim(0, total)
    axes.set_yticks([])
    axes.set_xlabel(unit, color=_INK, fontsize=9)
    _legend(axes, len(shares))
    return _uri(figure)


def _time_unit(hours: float) -> tuple[float, str]:
    if hours < _SECONDS_BELOW_HOURS:
        return 3600.0, "seconds"
    return (60.0, "minutes") if hours < _MINUTES_BELOW_HOURS else (1.0, "hours")


def _draw_lanes(axes: Any, lanes: Sequence[Lane], scale: float, hidden: int) -> None:
    """A band a worker, filled from its foot by each stage's share of the time."""
    _style(axes, "What ran when" + (f" ({hidden} more workers are not drawn)" if hidden else ""))
    names = list(dict.fromkeys(name for lane in lanes for name, _ in lane.shares))
    stages = [name for name in names if name not in _WEIGHTS]
    colours = {name: _WEIGHTS.get(name) or _COLOURS[stages.index(name) % len(_COLOURS)] for name in names}
    drawn: set[str] = set()
    for number, lane in enumerate(lanes):
        foot = len(lanes) - 1 - number + 0.06
        points = len(lane.shares[0][1])
        x = [place * lane.slice_hours * scale for place in range(points + 1)]
        levels = [0.0] * points
        full = [max(1.0, sum(shares[place] for _, shares in lane.shares)) for place in range(points)]
        for name, shares in lane.shares:
            upper = [level + share / whole for level, share, whole in zip(levels, shares, full, strict=True)]
            low, high = ([foot + 0.88 * level for level in [*row, row[-1]]] for row in (levels, upper))
            label = None if name in drawn else name
            axes.fill_between(x, low, high, step="post", color=colours[name], linewidth=0, label=label)
            drawn.add(name)
            levels = upper
    axes.set_ylim(0, len(lanes))
    axes.set_yticks([len(lanes) - 0.5 - number for number in range(len(lanes))], [f"worker {lane.worker}" for lane in lanes])
    axes.grid(visible=False)
    _legend(axes, len(names))


def _broken(line: Series, joints: Sequence[float]) -> Series:
    """The line with a gap where a run was resumed: the worker before it was another."""
    gaps = tuple((joint, float("nan")) for joint in joints)
    return Series(line.name, tuple(sorted((*line.points, *gaps), key=lambda point: point[0])))


def _draw_lines(axes: Any, title: str, lines: Sequence[Series], unit: str, scale: float) -> None:
    _style(axes, title)
    for number, line in enumerate(lines):
        x, y = zip(*line.points, strict=True)
        axes.plot([value * scale for value in x], y, label=line.name, color=_COLOURS[number % len(_COLOURS)], linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit, color=_INK, fontsize=9)
    _legend(axes, len(lines))


def _legend(axes: Any, entries: int) -> None:
    axes.legend(
        frameon=False, labelcolor=_INK, fontsize=8, ncols=min(5, entries), loc="lower right", bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.1, handlelength=1.2, columnspacing=1.2,
    )


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=10)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.grid(visible=True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GRID)


def _uri(figure: Figure) -> str:
    # As a picture: scripts and styles inside an <img> are dead, so nothing of it can act in the page.
    buffer = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
