"""Reads a picture of one plain shape: which colour, on which, what shape, how large, where.

It judges what the built-in model paints. It shares no code, no palette and no measure with the painter of the training
data (tools/builtin), so that a fault there cannot hide here; it needs numpy alone. What it cannot make out is "unclear".
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

PROPERTIES = ("colour", "background", "shape", "size", "position")
UNCLEAR = "unclear"
# least share of the pixels that must be one of the picture's two colours or a mix of them
LEAST_PLAIN = 0.93
# least share of the picture that the shape must cover
LEAST_AREA = 0.01
ANGLES = 72

Mask = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a picture shows, in the words of PROPERTIES; each may be UNCLEAR."""

    colour: str = UNCLEAR
    background: str = UNCLEAR
    shape: str = UNCLEAR
    size: str = UNCLEAR
    position: str = UNCLEAR


def name_colour(rgb: Sequence[float]) -> str:
    """The everyday name of a colour given as 0..255 red, green, blue."""
    hue, saturation, value = colorsys.rgb_to_hsv(*(float(part) / 255 for part in rgb))
    degrees = hue * 360
    if value < 0.22:
        return "black"
    if saturation < 0.13:
        return "white" if value > 0.85 else UNCLEAR
    if 300 <= degrees < 350 and value > 0.75 and saturation < 0.72:
        return "pink"
    # (first hue that is no longer this colour, its name); what lies between two names is neither
    bounds = ((13, "red"), (20, UNCLEAR), (43, "orange"), (46, UNCLEAR), (66, "yellow"), (100, UNCLEAR), (158, "green"), (175, UNCLEAR),
              (202, "cyan"), (212, UNCLEAR), (245, "blue"), (265, UNCLEAR), (305, "purple"), (346, UNCLEAR), (361, "red"))  # fmt: skip
    name = next(name for bound, name in bounds if degrees < bound)
    return name if saturation > 0.45 and value > 0.35 else UNCLEAR


def components(mask: Mask) -> list[Mask]:
    """The 4-connected parts of a mask, largest first."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row_of, start_of = np.nonzero(edges == 1)
    runs = [(int(y), int(x0), int(x1)) for y, x0, x1 in zip(row_of, start_of, np.nonzero(edges == -1)[1], strict=True)]
    owner = list(range(len(runs)))

    def root(i: int) -> int:
        while owner[i] != i:
            owner[i] = owner[owner[i]]
            i = owner[i]
        return i

    above: list[int] = []
    current: list[int] = []
    for i, (y, x0, x1) in enumerate(runs):
        if not current or runs[current[0]][0] != y:
            above = current if current and runs[current[0]][0] == y - 1 else []
            current = []
        current.append(i)
        for j in above:
            if runs[j][1] < x1 and x0 < runs[j][2]:
                owner[root(j)] = root(i)
    labels: dict[int, Mask] = {}
    for i, (y, x0, x1) in enumerate(runs):
        labels.setdefault(root(i), np.zeros_like(mask))[y, x0:x1] = True
    return sorted(labels.values(), key=lambda part: -int(part.sum()))


def fill_holes(part: Mask) -> Mask:
    """The part with everything it encloses."""
    rows, columns = np.nonzero(part)
    box = (slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1))
    whole = part.copy()
    outside = next(gap for gap in components(~np.pad(part[box], 1)) if gap[0, 0])
    whole[box] = ~outside[1:-1, 1:-1]
    return whole


def hull_area(part: Mask) -> float:
    """Area of the convex hull of the part's pixels, taken as unit squares."""
    rows, columns = np.nonzero(part & ~(np.roll(part, 1, 0) & np.roll(part, -1, 0) & np.roll(part, 1, 1) & np.roll(part, -1, 1)))
    corners = {(int(x) + i, int(y) + j) for y, x in zip(rows, columns, strict=True) for i in (0, 1) for j in (0, 1)}
    ordered = sorted(corners)

    def half(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
        chain: list[tuple[int, int]] = []
        for p in points:
            while len(chain) > 1:
                (ax, ay), (bx, by) = chain[-2:]
                if (bx - ax) * (p[1] - ay) > (by - ay) * (p[0] - ax):
                    break
                chain.pop()
            chain.append(p)
        return chain[:-1]

    hull = half(ordered) + half(ordered[::-1])
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(hull, hull[1:] + hull[:1], strict=True))) / 2


def count_corners(part: Mask) -> int:
    """How many times the outline swings out and back in one turn round the centroid; 0 for a round outline."""
    rows, columns = np.nonzero(part)
    cy, cx = rows.mean(), columns.mean()
    reach = np.arange(0, math.hypot(*part.shape), 0.25)
    angles = np.arange(ANGLES) * 2 * math.pi / ANGLES
    y = np.rint(cy + np.outer(np.sin(angles), reach)).astype(int)
    x = np.rint(cx + np.outer(np.cos(angles), reach)).astype(int)
    inside = (y >= 0) & (y < part.shape[0]) & (x >= 0) & (x < part.shape[1])
    hit = inside & part[y.clip(0, part.shape[0] - 1), x.clip(0, part.shape[1] - 1)]
    radius = np.where(hit, reach, 0).max(axis=1)
    swing = np.abs(np.fft.rfft(radius))[:9] * 2 / max(radius.sum(), 1e-9)
    swing[:2] = 0
    return int(swing.argmax()) if swing.max() > 0.05 else 0


def name_shape(part: Mask) -> str:
    """The shape of one connected part, by its area, holes and corners."""
    whole = fill_holes(part)
    rows, columns = np.nonzero(whole)
    box = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    area, hole, hull = whole.sum(), (whole & ~part).sum(), hull_area(whole)
    fullness, solidity, corners = area / box, area / hull, count_corners(whole)
    flatness = (np.ptp(rows) + 1) / (np.ptp(columns) + 1)
    if not 0.75 < flatness < 1.33:
        return UNCLEAR
    if hole > 0.05 * area:
        return "ring" if corners == 0 and fullness < 0.88 and hole < 0.7 * area else UNCLEAR
    if corners == 0 and solidity > 0.88 and 0.70 < fullness < 0.88:
        return "circle"
    if corners == 4 and solidity > 0.88 and fullness > 0.86:
        return "square"
    if corners == 3 and solidity > 0.82 and 0.42 < fullness < 0.66:
        return "triangle"
    if corners == 5 and solidity < 0.70:
        return "star"
    if corners == 4 and 0.58 < solidity < 0.84 and fullness < 0.72:
        return "cross"
    return UNCLEAR


def name_position(part: Mask) -> str:
    """Where the centroid of a part lies."""
    rows, columns = np.nonzero(part)
    dx = (columns.mean() + 0.5) / part.shape[1] - 0.5
    dy = (rows.mean() + 0.5) / part.shape[0] - 0.5
    if max(abs(dx), abs(dy)) < 0.085:
        return "center"
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "top" if dy < 0 else "bottom"


def name_size(part: Mask) -> str:
    """Small or large, by the longer side of the bounding box against the picture's shorter side."""
    rows, columns = np.nonzero(part)
    extent = (max(np.ptp(rows), np.ptp(columns)) + 1) / min(part.shape)
    return "small" if 0.2 < extent < 0.435 else "large" if 0.435 <= extent < 0.75 else UNCLEAR


def read_picture(pixels: npt.NDArray[np.uint8]) -> Reading:
    """Read one picture: uint8 [height, width, 3]."""
    picture = np.asarray(pixels, dtype=np.float64)
    frame = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    ground = np.median(frame, axis=0)
    background = name_colour(ground)
    away = np.linalg.norm(picture - ground, axis=2)
    rough = components(away > 60)
    if not rough or rough[0].sum() < LEAST_AREA * away.size:
        return Reading(background=background)
    far = away[rough[0]]
    ink = np.median(picture[rough[0]][far >= np.quantile(far, 0.4)], axis=0)
    # Along the line between the two colours: 0 is background, 1 is ink; off the line is something else.
    line = ink - ground
    share = ((picture - ground) @ line) / (line @ line)
    off = np.linalg.norm(picture - ground - share[..., None].clip(0, 1) * line, axis=2)
    if (off < 45).mean() < LEAST_PLAIN:
        return Reading(background=background)
    parts = components(share > 0.5)
    if not parts or parts[0].sum() < LEAST_AREA * share.size:
        return Reading(background=background)
    part = parts[0]
    if share[~part].clip(0, 1).sum() > 0.5 * part.sum():  # as much paint elsewhere: not one shape
        return Reading(background=background)
    return Reading(name_colour(ink), background, name_shape(part), name_size(part), name_position(fill_holes(part)))


def agreement(readings: Sequence[Reading], wanted: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Share of pictures that show what was wanted, for each property and for all five together.

    A property that a row of `wanted` leaves out counts as right in that row.
    """
    if len(readings) != len(wanted) or not readings:
        raise ValueError(f"{len(readings)} readings for {len(wanted)} wishes")
    pairs = list(zip(map(asdict, readings), wanted, strict=True))
    right = [[row.get(name, shown[name]) == shown[name] for name in PROPERTIES] for shown, row in pairs]
    shares = {name: sum(row[i] for row in right) / len(right) for i, name in enumerate(PROPERTIES)}
    return {**shares, "all": sum(all(row) for row in right) / len(right)}
