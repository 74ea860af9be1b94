"""Deployment profiles: configs/models/*.toml, one a family, and the user's own file.

Finds the profile of a model by its hub id, else by its pipeline class, else a generic one. Knows nothing of devices or plans.
The schema of a file is `SCHEMA`; docs/residency.md explains it.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from batchgen.errors import RefusedError, UsageError
from batchgen.inventory.records import ModelFacts, Profile
from batchgen.jobs import FPS_HIGH, FPS_LOW

TASKS = ("image", "video")
GROUPS = ("dit", "text_encoder", "image_encoder", "vae")
MODES = ("auto", "memory")
DEFAULTS = ("width", "height", "steps", "guidance", "num_frames", "fps")
DEFAULT_MODEL = "Qwen/Qwen-Image"
# Words in a pipeline class that mean moving pictures, for models that no profile knows.
_VIDEO_CLASS = re.compile(
    r"video|[ti]2v|wan|ltx|mochi|allegro|latte|animatediff|cosmos|skyreels|easyanimate|consisid|longlive|framepack", re.IGNORECASE
)


class ProfileError(RefusedError):
    """A profile file that does not follow the schema."""


def config_dir() -> Path:
    """The folder of profiles, catalogue and presets: `batchgen/configs` in a wheel, `configs/` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


# Checks: each takes a raw value and gives the stored one, or raises ValueError with what it should have been.


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError("a list of texts")
    return tuple(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004 - all checks speak through ValueError
    return value


def _size(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError("a number of GiB from 0")
    return float(value)


def _size_or_never(value: Any) -> Any:
    try:
        return value if value == "never" else _size(value)
    except ValueError:
        raise ValueError('a number of GiB from 0, or "never"') from None


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number from 1")
    return value


def _one_of(*words: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}{nearest_text(value, words)}")
        return value

    return check


def _some_of(*words: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        names = _texts(value)
        for name in names:
            if name not in words:
                raise ValueError(f"some of {', '.join(words)}{nearest_text(name, words)}")
        return names

    return check


def _defaults(value: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, Mapping):
        raise ValueError(f"a table of {', '.join(DEFAULTS)}")  # noqa: TRY004 - all checks speak through ValueError
    for key, number in value.items():
        if key not in DEFAULTS:
            raise ValueError(f"a table of {', '.join(DEFAULTS)}, and {key!r} is none of them{nearest_text(key, DEFAULTS)}")
        whole = key in ("width", "height", "steps", "num_frames")
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
            raise ValueError(f"a table of numbers from 0, and {key} is {number!r}")
        if whole and (not isinstance(number, int) or number < 1):
            raise ValueError(f"a table in which {key} is a whole number from 1, not {number!r}")
        if key == "fps" and not FPS_LOW <= number <= FPS_HIGH:
            raise ValueError(f"a table in which fps is {FPS_LOW:g} ... {FPS_HIGH:g}, not {number!r}")
    return tuple(value.items())


def _defaults_for(value: Any) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
    if not isinstance(value, Mapping):
        raise ValueError("a table of tables: word in the model's name -> defaults")  # noqa: TRY004
    return tuple((word.lower(), _defaults(table)) for word, table in value.items())


@dataclass(frozen=True, slots=True)
class Match:
    """When a profile takes a folder of one of its pipeline classes. Empty: always."""

    name_words: tuple[str, ...] = ()  # one of them in the folder's or model's name, lower case
    index: tuple[tuple[str, str], ...] = ()  # settings of model_index.json, as JSON text

    @property
    def empty(self) -> bool:
        return not self.name_words and not self.index

    def holds(self, name: str, index: Mapping[str, str]) -> bool:
        return any(word in name for word in self.name_words) or any(index.get(key) == value for key, value in self.index)


def _match(value: Any) -> Match:
    if not isinstance(value, Mapping) or not set(value) <= {"name_words", "index"}:
        raise ValueError("a table of name_words and index")
    index = value.get("index", {})
    if not isinstance(index, Mapping) or not all(isinstance(item, str | bool | int | float) for item in index.values()):
        raise ValueError("a table whose index holds plain values")
    words = tuple(word.lower() for word in _texts(value.get("name_words", [])))
    return Match(words, tuple((key, _json_text(item)) for key, item in index.items()))


def _json_text(value: str | bool | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)


# Every key a profile file may have, and the check of its value. name, task and source are required.
SCHEMA: Mapping[str, Callable[[Any], Any]] = {
    "name": _text,
    "task": _one_of(*TASKS),
    "source": _text,
    "models": _texts,
    "pipeline_classes": _texts,
    "components": _texts,
    "uses_cfg": _flag,
    "dit_layerwise_offload_modes": _some_of(*MODES),
    "dit_offload_prefetch_size": _count,
    "keep_resident_min_available_gb": _size_or_never,
    "keep_resident_components": _some_of(*GROUPS),
    "fsdp_auto_min_available_memory_gb": _size,
    "fsdp_auto_requires_cfg": _flag,
    "auto_enable_cfg_parallel": _flag,
    "supports_cfg_parallel": _flag,
    "match": _match,
    "defaults": _defaults,
    "defaults_for": _defaults_for,
}
REQUIRED = ("name", "task", "source")


def nearest_text(word: Any, choices: Iterable[str]) -> str:
    found = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.0)
    return f" (did you mean {found[0]!r}?)" if found else ""


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A profile as its file says it, with what decides whether and how it applies to one model."""

    profile: Profile
    match: Match = Match()
    defaults_for: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()

    def for_model(self, name: str, matched: str) -> Profile:
        """The profile with the defaults that hold for a model of this name."""
        defaults = dict(self.profile.defaults)
        for word, special in self.defaults_for:
            if word in name.lower():
                defaults.update(special)
        return replace(self.profile, defaults=tuple(defaults.items()), matched=matched)


def read_profile(path: Path) -> ProfileFile:
    """One profile file, checked whole. Raises ProfileError that names the file, the key and the nearest right key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8"
        raise ProfileError(f"profile file {path}: cannot be read: {reason}", hint="Give the path of a TOML file.") from error
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"profile file {path}: not TOML: {error}", hint="See configs/models/ for examples.") from error
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in SCHEMA:
            raise ProfileError(f"profile file {path}: unknown key {key!r}{nearest_text(key, SCHEMA)}", hint=f"Known: {', '.join(SCHEMA)}.")
        try:
            values[key] = SCHEMA[key](value)
        except ValueError as error:
            raise ProfileError(f"profile file {path}: {key} must be {error}, not {value!r}") from error
    missing = [key for key in REQUIRED if key not in values]
    if missing:
        raise ProfileError(f"profile file {path}: {', '.join(missing)} missing", hint=f"Every profile needs {', '.join(REQUIRED)}.")
    modes = values.get("dit_layerwise_offload_modes", ())
    if "auto" in modes and "memory" not in modes:
        raise ProfileError(
            f'profile file {path}: dit_layerwise_offload_modes lists "auto" without "memory"',
            hint='Memory mode may not save less than auto: add "memory".',
        )
    match, defaults_for = values.pop("match", Match()), values.pop("defaults_for", ())
    return ProfileFile(Profile(**values), match, defaults_for)


@cache
def _files(folder: Path) -> Mapping[str, Path]:
    return {path.stem: path for path in sorted((folder / "models").glob("*.toml"))}


@cache
def all_profiles() -> Mapping[str, ProfileFile]:
    """Every shipped profile by name."""
    return {name: read_profile(path) for name, path in _files(config_dir()).items()}


def profile_names() -> tuple[str, ...]:
    return tuple(_files(config_dir()))


def named_profile(name: str) -> ProfileFile:
    """The shipped profile of that name. Raises UsageError with the nearest one."""
    path = _files(config_dir()).get(name)
    if path is None:
        names = profile_names()
        raise UsageError(f"--profile: there is no profile {name!r}{nearest_text(name, names)}", option="--profile",
                         hint=f"Profiles: {', '.join(names)}.")  # fmt: skip
    return read_profile(path)


def find_profile(model: ModelFacts | None, *, name: str | None = None, file: Path | None = None) -> Profile:
    """The profile for a model: the file or name given, else by hub id, else by pipeline class, else a generic one.

    Without a model and a name: the one of DEFAULT_MODEL. Raises UsageError and ProfileError.
    """
    label = model_label(model) if model else DEFAULT_MODEL
    if name is not None and file is not None:
        raise UsageError("--profile and --profile-file both name a profile", option="--profile-file", hint="Give one of them.")
    if file is not None:
        return read_profile(file).for_model(label, f"--profile-file {file}")
    if name is not None:
        return named_profile(name).for_model(label if model else name, f"--profile {name}")
    source = model.source if model else DEFAULT_MODEL
    by_id = profile_of_id(source)
    if by_id is not None:
        return by_id
    if model is not None and model.pipeline_class is not None:
        best = _by_class(model, label)
        if best is not None:
            return best.for_model(label, f"pipeline class {model.pipeline_class}")
    video = model is not None and bool(_VIDEO_CLASS.search(model.pipeline_class or ""))
    generic = "generic-video" if video else "generic-image"
    return named_profile(generic).for_model(label, "no profile knows this model")


def profile_of_id(source: str) -> Profile | None:
    """The profile that lists this hub id (letter case aside), or None."""
    wanted = source.lower()
    for path in _files(config_dir()).values():
        # Reading is cheap, parsing forty files is not: most of them do not even hold the words.
        if wanted not in path.read_text(encoding="utf-8").lower():
            continue
        entry = read_profile(path)
        if any(model.lower() == wanted for model in entry.profile.models):
            return entry.for_model(source, f"model id {source}")
    return None


def _by_class(model: ModelFacts, label: str) -> ProfileFile | None:
    """Of the profiles that know the pipeline class: those whose [match] holds come first, then the likest set of components."""
    name, index, parts = label.lower(), dict(model.index), {part.name for part in model.components}
    candidates = [entry for entry in all_profiles().values() if model.pipeline_class in entry.profile.pipeline_classes]
    matching = [entry for entry in candidates if not entry.match.empty and entry.match.holds(name, index)]
    fitting = matching or [entry for entry in candidates if entry.match.empty] or candidates
    return min(fitting, key=lambda entry: (len(parts ^ set(entry.profile.components)), entry.profile.name), default=None)


def model_label(model: ModelFacts) -> str:
    """The name by which people would know a model: its hub id, or its folder's name (also within a hub cache)."""
    if model.kind == "hub":
        return model.source
    for part in reversed(Path(model.folder or model.source).parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return Path(model.folder or model.source).name
