"""What decides how a manifest is read and what its rows become. Plain values, set once by the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from batchgen.inventory.loras import LoraFile
from batchgen.inventory.prompt_limits import TextEncoderLimit
from batchgen.inventory.records import SizeRules

KINDS = ("csv", "tsv", "jsonl", "json", "txt", "folder", "parquet")
DEFAULT_NAME = "{index:06d}-{slug}"
INPUTS = ("image", "last_image", "mask", "strength", "lora")


@dataclass(frozen=True, slots=True)
class JobDefaults:
    """What a job takes where its row says nothing. None: the model's own default."""

    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    true_cfg_scale: float | None = None
    num_images: int = 1
    num_frames: int | None = None
    fps: float | None = None
    strength: float | None = None
    lora: str | None = None  # NAME or NAME:WEIGHT
    seed: int | Literal["random"] | None = None  # None: from the row's identity


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """How to read a manifest. The defaults read any well-formed file without a model."""

    format: str | None = None  # one of KINDS; None: from the file's name
    encoding: str | None = None  # None: UTF-8, or what a byte-order mark says
    delimiter: str | None = None  # None: from the header line
    prompt_column: str | None = None
    carry: tuple[str, ...] = ()  # columns to carry as they are, though their name looks like a known one's
    defaults: JobDefaults = field(default_factory=JobDefaults)
    name_template: str = DEFAULT_NAME
    extension: str = ".png"
    model_name: str = "model"  # what {model} in a name gives
    model_revision: str = ""
    pixel_settings: tuple[tuple[str, str], ...] = ()  # run-wide settings that alter pixels; part of every job's identity
    rules: SizeRules | None = None
    tokenizers: tuple[TextEncoderLimit, ...] = ()
    takes_negative_prompt: bool | None = None  # None: unknown
    skip_invalid: bool = False
    snap: bool = False
    dedupe: bool = False
    allow_empty_prompt: bool = False
    on_truncate: Literal["warn", "error"] = "warn"
    limit: int | None = None  # only the first so many rows
    inputs_supported: frozenset[str] = frozenset()  # of INPUTS: what the engine takes
    loras: tuple[LoraFile, ...] = ()  # what rows may name
    shown_as: str | None = None  # the name in messages, where the path is a copy of standard input
    one_size: bool = False  # the defaults' width and height were said together, with --size
    faults_file: str | None = None  # every fault, one a line, is written here as well
