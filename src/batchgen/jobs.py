"""A job is one picture or one clip: everything that decides its pixels, and the identity that survives a resume.

Knows nothing of files, models, devices or plans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

SEED_LIMIT = 2**64
FPS_LOW, FPS_HIGH = 0.1, 1000.0  # of a clip: a frame lasts between a millisecond, WebP's least, and ten seconds

SeedSource = Literal["row", "option", "identity", "drawn"]


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """What must be equal for jobs to share one forward. Never the seed or the prompt. None: the model's own default."""

    width: int | None
    height: int | None
    num_frames: int | None
    fps: float | None
    steps: int | None
    guidance: float | None
    true_cfg_scale: float | None
    strength: float | None
    lora: str | None
    inputs: tuple[str, ...]  # which picture inputs the job has: of "image", "last_image", "mask"

    @property
    def text(self) -> str:
        """`1024x1024`, `832x480x81`, with what differs from a plain picture behind it."""
        size = f"{self.width or '?'}x{self.height or '?'}"
        if self.num_frames is not None:
            size += f"x{self.num_frames}"
        parts = [size]
        if self.steps is not None:
            parts.append(f"{self.steps} steps")
        if self.guidance is not None:
            parts.append(f"guidance {self.guidance:g}")
        if self.true_cfg_scale is not None:
            parts.append(f"true cfg {self.true_cfg_scale:g}")
        if self.strength is not None:
            parts.append(f"strength {self.strength:g}")
        if self.lora is not None:
            parts.append(f"lora {self.lora}")
        parts.extend(self.inputs)
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Job:
    """One picture or clip. Sizes in pixels; None means the model's own default (resolved where the model is loaded)."""

    key: str  # identity, 32 hex digits
    index: int  # the row's place among the manifest's rows, from 0
    row: int  # the line the row starts on, as an editor counts, from 1
    k: int  # the picture's number within its row, from 0
    id: str  # the row's id, or a short hash of the row
    prompt: str
    negative_prompt: str | None
    seed: int
    seed_source: SeedSource
    output: str  # planned path below outputs/, POSIX separators, with its extension
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    true_cfg_scale: float | None = None
    num_frames: int | None = None
    fps: float | None = None
    image: str | None = None  # absolute path; several, where the model takes them, with " | " between
    last_image: str | None = None
    mask: str | None = None
    strength: float | None = None
    lora: str | None = None  # NAME or NAME:WEIGHT
    extra: tuple[tuple[str, str], ...] = ()  # the manifest's other columns, untouched
    snapped: tuple[tuple[str, int], ...] = ()  # sizes or frames asked for, where --snap took the nearest that the model can make

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEED_LIMIT:
            raise ValueError(f"seed {self.seed} is outside 0 ... 2^64-1")
        if self.k < 0 or self.index < 0:
            raise ValueError("index and k count from 0")

    @property
    def shape(self) -> ShapeKey:
        inputs = tuple(name for name in ("image", "last_image", "mask") if getattr(self, name) is not None)
        return ShapeKey(
            self.width, self.height, self.num_frames, self.fps, self.steps, self.guidance, self.true_cfg_scale,
            self.strength, self.lora, inputs,
        )

    def as_json(self) -> str:
        """One JSON object, for the journal and the metadata. `from_json` gives an equal job back."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        fields["extra"] = tuple((str(name), str(value)) for name, value in fields["extra"])
        fields["snapped"] = tuple((str(name), int(value)) for name, value in fields.get("snapped", ()))
        return cls(**fields)


_canonical = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def _digest(value: object) -> str:
    text = _canonical(value)
    # surrogatepass: a lone surrogate in a prompt is a manifest fault, but hashing must not be what finds it
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def row_hash(fields: Mapping[str, object]) -> str:
    """64 hex digits over a row's own typed fields: known columns that hold a value, after aliases and number parsing.

    Leave out what the row does not say itself (defaults), its place, and the columns batchgen does not know: editing a
    remark must not render a picture again. `30` and `30.0` must come as the same value.
    """
    return _digest({name: value for name, value in fields.items() if value is not None})


def job_key(row: str, occurrence: int, k: int, model_revision: str, pixel_settings: Mapping[str, object]) -> str:
    """Identity of a job, 32 hex digits.

    `row` from `row_hash`; `occurrence` counts equal rows from 0; `pixel_settings` holds every setting of the run that alters
    pixels of this job (resolved defaults, dtype, ...), never the memory plan, the batch size or the device.
    """
    return _digest([row, occurrence, k, model_revision, dict(pixel_settings)])[:32]


def seed_from_row(row: str, occurrence: int) -> int:
    """The seed of a row that names none: from the row alone, so that another number of steps keeps the same noise."""
    return int.from_bytes(hashlib.sha256(f"seed {row} {occurrence}".encode()).digest()[:8], "big")


def picture_seed(base: int, k: int) -> int:
    """Seed of picture k of a row: base + k, wrapping at 2^64."""
    return (base + k) % SEED_LIMIT


def largest_jobs(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The job with the most pixels for each set of picture inputs, the first of equals. Sizes left to the model count as nothing."""
    found: dict[tuple[str, ...], tuple[int, Job]] = {}
    for job in jobs:
        size = (job.width or 0) * (job.height or 0) * (job.num_frames or 1)
        kind = job.shape.inputs
        if kind not in found or size > found[kind][0]:
            found[kind] = size, job
    return tuple(job for _, job in found.values())
