"""model_index.json, read by ourselves: no class is imported, no code of a model runs before the user agreed to it.

Pure over the parsed JSON; the only look outside is at the files of the installed diffusers, as text, to know its names.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from batchgen.errors import ModelError

INDEX_NAME = "model_index.json"

# Parts that never carry weights, known by what their class is called.
_WEIGHTLESS = re.compile(
    r"(Scheduler(Discrete)?|Tokenizer(Fast|V2|Base)?|Processor(Fast|Pil)?|FeatureExtractor|Guidance|Guider)$|Guidance|Scheduler"
)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One part: where its class comes from and what it is called."""

    name: str
    library: str
    class_name: str

    @property
    def weightless(self) -> bool:
        return _WEIGHTLESS.search(self.class_name) is not None


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """A parsed model_index.json. `settings` holds its plain values as JSON text; `foreign` says what needs consent."""

    pipeline_class: str
    entries: tuple[IndexEntry, ...]
    absent: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    foreign: tuple[str, ...]


_UNKNOWN = "has no class"


def read_index(folder: Path, *, trust_remote_code: bool) -> ModelIndex:
    """The index of a model folder. Raises ModelError for whatever is wrong with it, all faults at once."""
    path = folder / INDEX_NAME
    if not path.is_file():
        raise not_a_pipeline(folder)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise ModelError(f"{path} is empty: an interrupted download", hint="Fetch the file again.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", hint="Fetch the file again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object, so it is not the index of a pipeline")
    index = parse_index(content, str(path))
    if index.foreign and not trust_remote_code:
        listed = "\n".join(f"  {line}" for line in index.foreign)
        newer = "A newer diffusers may have it: python -m pip install -U diffusers. " if _UNKNOWN in listed else ""
        raise ModelError(
            f"{path} asks for code that is not part of the installed diffusers or transformers:\n{listed}",
            hint=f"{newer}If it is code of the model's own, look at it first; then pass --trust-remote-code to run it.",
        )
    return index


def parse_index(content: Mapping[str, object], where: str) -> ModelIndex:
    """Entries, absent parts and plain settings. Raises ModelError with every malformed entry."""
    faults: list[str] = []
    entries: list[IndexEntry] = []
    absent: list[str] = []
    settings: list[tuple[str, str]] = []
    foreign: list[str] = []
    pipeline_class = _pipeline_class(content.get("_class_name"), foreign, faults)
    for name, value in content.items():
        if name.startswith("_"):
            continue
        if value is None:
            absent.append(name)
        elif not isinstance(value, list) or _plain_list(value):
            settings.append((name, json.dumps(value)))
        elif fault := _malformed(value):
            faults.append(f"{name}: {fault}")
        elif value[0] is None:
            absent.append(name)
        elif _escapes(name):
            faults.append(f"{name!r} is not a folder name of this model")
        else:
            entry = IndexEntry(name, value[0], value[1])
            entries.append(entry)
            if reason := _foreign(entry):
                foreign.append(reason)
    required = required_parts(pipeline_class) if absent else frozenset()
    faults += [f"{name}: null, but {pipeline_class} cannot do without it" for name in absent if name in required]
    if faults:
        listed = "\n".join(f"  {line}" for line in faults)
        raise ModelError(f"{where} has entries that cannot be used:\n{listed}", hint="An entry is [library, class name] or [null, null].")
    if not entries:
        raise ModelError(f"{where} names no parts, so there is no pipeline to load")
    return ModelIndex(pipeline_class, tuple(entries), tuple(absent), tuple(settings), tuple(foreign))


def _pipeline_class(value: object, foreign: list[str], faults: list[str]) -> str:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) and part for part in value):
        foreign.append(f"the pipeline itself: class {value[1]!r} from the module {value[0]!r}")
        return str(value[1])
    if not isinstance(value, str) or not value:
        faults.append(f"_class_name: the pipeline's class name should be text, not {json.dumps(value)}")
        return ""
    if not _in_diffusers(value):
        foreign.append(f"the pipeline itself: diffusers {_diffusers_version()} {_UNKNOWN} {value!r}")
    return value


def _plain_list(value: list[object]) -> bool:
    return all(isinstance(item, int | float) for item in value)


def _malformed(value: list[object]) -> str | None:
    shown = json.dumps(value)
    if len(value) != 2:
        return f"{shown} is not a pair"
    library, class_name = value
    if library is None and class_name is None:
        return None
    if library is None or class_name is None:
        return f"{shown} is half null: the part has a class or it has none"
    if not isinstance(library, str) or not isinstance(class_name, str) or not library or not class_name:
        return f"{shown} should be two texts"
    return None


def _escapes(name: str) -> bool:
    return name in {"", ".", ".."} or any(char in name for char in "/\\:\0")


def _foreign(entry: IndexEntry) -> str | None:
    """Why an entry's class is not one of the known libraries', or None."""
    if entry.library == "transformers":
        return None
    if entry.library == "diffusers":
        if _in_diffusers(entry.class_name):
            return None
        return f"{entry.name}: diffusers {_diffusers_version()} {_UNKNOWN} {entry.class_name!r}"
    if entry.library in _pipeline_modules():  # diffusers keeps a few components beside their pipelines, e.g. ltx2
        return None
    return f"{entry.name}: class {entry.class_name!r} from the module {entry.library!r}"


@lru_cache(maxsize=1)
def _diffusers_root() -> Path | None:
    spec = importlib.util.find_spec("diffusers")  # finds the folder, imports nothing
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


@lru_cache(maxsize=1)
def _diffusers_names() -> frozenset[str]:
    root = _diffusers_root()
    return frozenset(re.findall(r'"(\w+)"', (root / "__init__.py").read_text(encoding="utf-8"))) if root else frozenset()


@lru_cache(maxsize=8)
def required_parts(class_name: str) -> frozenset[str]:
    """Parts that a diffusers pipeline cannot do without, read from its source text; empty for a class that is not found.

    Those its __init__ takes with no default and its `_optional_components` does not name.
    """
    root = _diffusers_root()
    if root is None or not class_name.isidentifier():
        return frozenset()
    start = f"class {class_name}("
    for path in sorted((root / "pipelines").glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        if start not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                return _required_in(node)
    return frozenset()


def _required_in(node: ast.ClassDef) -> frozenset[str]:
    required: set[str] = set()
    optional: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "_optional_components" for to in item.targets):
            optional.update(ast.literal_eval(item.value))
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            names = [argument.arg for argument in item.args.args][1:]
            required.update(names[: len(names) - len(item.args.defaults)])
    return frozenset(required - optional)


@lru_cache(maxsize=1)
def _pipeline_modules() -> frozenset[str]:
    root = _diffusers_root()
    folder = root / "pipelines" if root else None
    if folder is None or not folder.is_dir():
        return frozenset()
    return frozenset(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("_"))


@lru_cache(maxsize=1)
def _diffusers_version() -> str:
    root = _diffusers_root()
    if root is None:
        return "(not installed)"
    found = re.search(r'^__version__ = "([^"]+)"', (root / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else ""


def _in_diffusers(class_name: str) -> bool:
    return class_name in _diffusers_names()


_CHECKPOINTS = frozenset({".safetensors", ".ckpt", ".gguf", ".pt", ".pth"})


def not_a_pipeline(folder: Path) -> ModelError:
    """Why a folder without model_index.json is no pipeline: what it is instead."""
    hint = "--model takes a folder or hub id in diffusers' layout: model_index.json and one folder a component."
    if (folder / "modular_model_index.json").is_file():
        return ModelError(f"{folder} is a modular repository (modular_model_index.json) without {INDEX_NAME}", hint=hint)
    single = sorted(path.name for path in folder.iterdir() if path.is_file() and path.suffix in _CHECKPOINTS)
    config = _small_json(folder / "config.json")
    if config is not None:
        what = config.get("architectures") or config.get("_class_name") or config.get("model_type") or "a model"
        name = ", ".join(map(str, what)) if isinstance(what, list) else str(what)
        return ModelError(f"{folder} is not a pipeline: it has no {INDEX_NAME}; its config.json describes {name}", hint=hint)
    if single:
        return single_file(folder / single[0])
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir() and (path / INDEX_NAME).is_file())
    if inside:
        return ModelError(f"{folder} has no {INDEX_NAME}, but its folder {inside[0]!r} has", hint=f"Pass --model {folder / inside[0]}.")
    return ModelError(f"{folder} is not a pipeline: it has no {INDEX_NAME}", hint=hint)


def single_file(path: Path) -> ModelError:
    """A checkpoint in one file has no configs beside it."""
    return ModelError(
        f"{path} is a single-file checkpoint: it carries weights without the configs of its components",
        hint="Convert it once with diffusers: `PIPELINE.from_single_file(FILE).save_pretrained(FOLDER)`, then pass --model FOLDER.",
    )


def _small_json(path: Path) -> Mapping[str, object] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None

