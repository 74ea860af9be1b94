"""The painter: scenes, their pictures and the sentences that describe them.

The training data of the built-in model is made here and nowhere else, from seeds alone. A scene is one shape of one
colour on a plain background. Scenes for which `held_out` is true are never painted for training; they are what the
model is judged on. The judge (tests/judge.py) must not import this file.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (222, 34, 36),
    "orange": (250, 135, 10),
    "yellow": (248, 222, 50),
    "green": (34, 155, 60),
    "cyan": (50, 205, 225),
    "blue": (35, 70, 215),
    "purple": (125, 45, 165),
    "pink": (248, 140, 190),
    "white": (246, 246, 246),
    "black": (14, 14, 14),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
# radius of the shape, as a share of the picture's shorter side
RADII = {"small": 0.18, "large": 0.28}
# direction in which the centre leaves the middle of the picture
POSITIONS: dict[str, tuple[int, int]] = {"center": (0, 0), "left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
# how far it leaves it, as a share of the width or height: a large shape has less room
OFFSETS = {"small": 0.25, "large": 0.16}
# (width, height) in pixels: what the model is trained on
PICTURE_SIZES = ((64, 64), (96, 96), (96, 64), (64, 96))
HELD_OUT_PERCENT = 12
SUPERSAMPLING = 4


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows; every field is a key of the tables above."""

    colour: str
    shape: str
    size: str
    position: str
    background: str


def all_scenes() -> list[Scene]:
    """Every scene whose shape can be told from its background: 5,400."""
    fields = itertools.product(COLOURS, SHAPES, RADII, POSITIONS, COLOURS)
    return [scene for scene in itertools.starmap(Scene, fields) if scene.colour != scene.background]


def held_out(scene: Scene) -> bool:
    """Whether a scene is kept from training: by a hash, so that no list has to be stored."""
    digest = hashlib.sha256("|".join(astuple(scene)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def draw_shape(draw: ImageDraw.ImageDraw, shape: str, colour: tuple[int, int, int], x: float, y: float, radius: float) -> None:
    """Draw one filled shape round (x, y); lengths in the canvas's own pixels."""
    r = radius
    match shape:
        case "circle":
            draw.ellipse([x - r, y - r, x + r, y + r], fill=colour)
        case "ring":
            draw.ellipse([x - r, y - r, x + r, y + r], outline=colour, width=round(r * 0.42))
        case "square":
            draw.rectangle([x - 0.9 * r, y - 0.9 * r, x + 0.9 * r, y + 0.9 * r], fill=colour)
        case "triangle":
            draw.polygon([(x, y - 1.1 * r), (x + r, y + 0.7 * r), (x - r, y + 0.7 * r)], fill=colour)
        case "cross":
            arm = 0.34 * r
            draw.rectangle([x - r, y - arm, x + r, y + arm], fill=colour)
            draw.rectangle([x - arm, y - r, x + arm, y + r], fill=colour)
        case "star":
            radii = [1.1 * r if i % 2 == 0 else 0.46 * r for i in range(10)]
            draw.polygon(
                [(x + q * math.sin(i * math.pi / 5), y + 0.05 * r - q * math.cos(i * math.pi / 5)) for i, q in enumerate(radii)],
                fill=colour,
            )
        case _:
            raise ValueError(f"unknown shape {shape!r}")


def paint(scene: Scene, rng: random.Random, width: int = 64, height: int = 64) -> npt.NDArray[np.uint8]:
    """Paint a scene with a little play in place and size: [height, width, 3], 0..255."""
    scale = SUPERSAMPLING
    radius = RADII[scene.size] * rng.uniform(0.95, 1.05)
    offset, (dx, dy) = OFFSETS[scene.size], POSITIONS[scene.position]
    x = 0.5 + dx * offset + rng.uniform(-0.015, 0.015)
    y = 0.5 + dy * offset + rng.uniform(-0.015, 0.015)
    image = Image.new("RGB", (width * scale, height * scale), COLOURS[scene.background])
    place = (x * width * scale, y * height * scale, radius * min(width, height) * scale)
    draw_shape(ImageDraw.Draw(image), scene.shape, COLOURS[scene.colour], *place)
    return np.asarray(image.reduce(scale))


COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red", "red", "red", "scarlet", "crimson"),
    "orange": ("orange",),
    "yellow": ("yellow", "yellow", "yellow", "golden"),
    "green": ("green", "green", "green", "emerald"),
    "cyan": ("cyan", "cyan", "cyan", "turquoise", "aqua"),
    "blue": ("blue", "blue", "blue", "cobalt"),
    "purple": ("purple", "purple", "purple", "violet"),
    "pink": ("pink", "pink", "pink", "rose"),
    "white": ("white",),
    "black": ("black",),
}
SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "circle", "circle", "disc", "disk", "dot", "ball"),
    "square": ("square", "square", "square", "box", "block"),
    "triangle": ("triangle", "triangle", "triangle", "pyramid"),
    "star": ("star",),
    "ring": ("ring", "ring", "ring", "hoop", "donut"),
    "cross": ("cross", "cross", "cross", "plus", "plus sign"),
}
SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "small", "small", "little", "tiny"),
    "large": ("large", "large", "big", "big", "huge"),
}
POSITION_WORDS: dict[str, tuple[str, ...]] = {
    "center": ("in the center", "in the centre", "in the middle", "at the center", "centered", "center", "in the very middle", "middle"),
    "left": ("on the left", "to the left", "at the left", "left side", "on the left side", "left", "at the left edge", "towards the left"),
    "right": (
        "on the right",
        "to the right",
        "at the right",
        "right side",
        "on the right side",
        "right",
        "at the right edge",
        "towards the right",
    ),
    "top": ("at the top", "on top", "near the top", "top", "in the upper part", "up high", "at the top edge", "above the middle"),
    "bottom": ("at the bottom", "near the bottom", "bottom", "in the lower part", "down low", "at the bottom edge", "below the middle"),
}
BACKGROUND_FORMS = (
    "on a {} background", "on a {} background", "on {}", "on {}", "against {}", "against a {} background", "with a {} background",
    "{} background", "over {}", "background {}", "the background is {}", "background: {}", "on plain {}", "on a {} wall",
    "in front of {}",
)  # fmt: skip
OPENINGS = (
    "draw", "please draw", "paint", "please paint", "a picture of", "an image of", "show", "show me", "there is", "i want",
    "we see", "make", "a painting of", "an image with", "a simple drawing of", "picture:",
)  # fmt: skip


def article(phrase: str) -> str:
    """`phrase` with the article that fits it."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def subject(scene: Scene, rng: random.Random, say_size: bool, say_colour: bool, say_shape: bool) -> str:
    """The shape in words, with or without its size and colour."""
    shape = rng.choice(SHAPE_WORDS[scene.shape]) if say_shape else rng.choice(("shape", "thing", "figure", "object"))
    colour = rng.choice(COLOUR_WORDS[scene.colour]) if say_colour else ""
    size = rng.choice(SIZE_WORDS[scene.size]) if say_size else ""
    form = rng.random()
    if form < 0.72:
        phrase = " ".join(filter(None, (size, colour, shape)))
        return article(phrase) if rng.random() < 0.75 else phrase
    if form < 0.80:
        phrase = " ".join(filter(None, (colour, shape)))
        return ", ".join(filter(None, (article(phrase), size)))
    if form < 0.86:
        phrase = " ".join(filter(None, (size, shape)))
        return article(phrase) + (f" in {colour}" if colour else "")
    if form < 0.92:
        phrase = " ".join(filter(None, (colour, shape)))
        return article(phrase) + (f", {size} in size" if size else "")
    if form < 0.96:
        return ", ".join(filter(None, (shape, colour, size)))
    return f"the {shape}" + (f" is {' and '.join(filter(None, (size, colour)))}" if size or colour else "")


def describe(scene: Scene, rng: random.Random, complete: bool = False) -> str:
    """A sentence about a scene; unless `complete`, parts are left unsaid now and then."""

    def said(chance: float) -> bool:
        return complete or rng.random() < chance

    parts = [subject(scene, rng, say_size=said(0.85), say_colour=said(0.96), say_shape=said(0.98))]
    place = rng.choice(POSITION_WORDS[scene.position]) if said(0.85) else ""
    ground = rng.choice(BACKGROUND_FORMS).format(rng.choice(COLOUR_WORDS[scene.background])) if said(0.93) else ""
    rest = [part for part in (place, ground) if part]
    if rng.random() < 0.3:
        rest.reverse()
    if rng.random() < 0.25:
        first = rest.pop(0) if rest else ""
        sentence = ", ".join(filter(None, (first, *parts)))
        sentence = rng.choice((" ", ", ")).join((sentence, *rest)) if rest else sentence
    else:
        opening = rng.choice(OPENINGS) + " " if rng.random() < 0.25 else ""
        sentence = opening + rng.choice((" ", " ", ", ")).join((*parts, *rest))
    sentence = re.sub(r"\ba (?=[aeiou])", "an ", sentence)
    ending = rng.random()
    return sentence + ("." if ending < 0.15 else ", please" if ending < 0.18 else "")


def fragment(scene: Scene, rng: random.Random) -> str:
    """One property alone, as people write negative prompts."""
    colour, ground = rng.choice(COLOUR_WORDS[scene.colour]), rng.choice(COLOUR_WORDS[scene.background])
    shape, size = rng.choice(SHAPE_WORDS[scene.shape]), rng.choice(SIZE_WORDS[scene.size])
    return rng.choice(
        (shape, article(shape), size, f"{colour} {shape}", article(f"{colour} {shape}"), colour, f"{ground} background",
         f"on {ground}", rng.choice(POSITION_WORDS[scene.position]), f"{size} {shape}", f"{shape}s")
    )  # fmt: skip


def training_scenes() -> list[Scene]:
    """The scenes that may be painted for training."""
    return [scene for scene in all_scenes() if not held_out(scene)]
