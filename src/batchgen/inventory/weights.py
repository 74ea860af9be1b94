"""Which of a component's files are its weights: one format, one variant, all shards, nothing twice.

Works on a listing of paths, so that the same choice is made before a download as for a folder at hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import basename

# Stems that the loaders of the two libraries look for; a file under another name is never found by them.
STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
PICKLE_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "pytorch_model"}
_NAME = re.compile(
    r"^(?P<stem>diffusion_pytorch_model|pytorch_model|model)"
    r"(?:\.(?P<variant>[A-Za-z0-9_-]+?))?"
    r"(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?"
    r"(?:\.(?P<old_variant>[A-Za-z0-9_-]+))?"
    r"\.(?P<format>safetensors|bin)$"
)
_INDEX = re.compile(
    r"^(?P<stem>diffusion_pytorch_model|pytorch_model|model)\.(?P<format>safetensors|bin)\.index(?:\.(?P<variant>[A-Za-z0-9_-]+))?\.json$"
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files a component loads. `fault` says why there are none that could be; then `files` is empty."""

    files: tuple[str, ...] = ()  # paths below the model's folder
    variant: str | None = None
    pickle: bool = False
    fault: str | None = None
    note: str | None = None


@dataclass(slots=True)
class _Set:
    """All files of one format and variant."""

    single: str | None = None
    shards: list[str] | None = None
    index: str | None = None


def is_weight_file(name: str) -> bool:
    """Any file with weights of some framework: what a download leaves out unless it was chosen."""
    return name.endswith((
        ".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".h5", ".onnx", ".onnx_data", ".pb", ".gguf", ".xml", ".tflite", ".npz",
    ))


def choose(
    component: str, library: str, listing: Sequence[str], read_text: Callable[[str], str], *, variant: str | None, allow_pickle: bool,
) -> Chosen:
    """The weights of a component's folder.

    `listing` holds all paths of the model (POSIX); `read_text` gives a shard index's text. The variant asked for comes first,
    then plain files (with a note), then the only other variant there is (with a note). Safetensors come before pickles always.
    """
    names = [path for path in listing if path.startswith(component + "/") and path.count("/") == 1]
    sets = _sets(names, library)
    for kind in ("safetensors", "bin"):
        found = {name: files for (fmt, name), files in sets.items() if fmt == kind}
        if not found:
            continue
        picked, note = _pick_variant(component, found, variant)
        if picked is _NONE:
            return Chosen(fault=note)
        if kind == "bin" and not allow_pickle:
            return Chosen(
                fault=f"{component}: only pickle weights ({basename(_first(found[picked]))}), which can run code when loaded;"
                " prefer a safetensors revision or variant, or pass --allow-pickle if you trust them"
            )
        files, fault = _files(component, found[picked], listing, read_text, prefer_index=library != "transformers")
        return Chosen(fault=fault) if fault else Chosen(tuple(files), picked, kind == "bin", note=note)
    return Chosen(fault=_nothing(component, names))


_NONE = "\0none"


def _sets(names: Sequence[str], library: str) -> dict[tuple[str, str | None], _Set]:
    stems = {STEMS.get(library, ""), PICKLE_STEMS.get(library, "")} - {""} or {*STEMS.values(), *PICKLE_STEMS.values()}
    if library not in STEMS:
        stems = {*STEMS.values(), *PICKLE_STEMS.values()}
    sets: dict[tuple[str, str | None], _Set] = {}
    for path in sorted(names):
        name = basename(path)
        if (match := _INDEX.match(name)) and match["stem"] in stems:
            sets.setdefault((match["format"], match["variant"]), _Set()).index = path
        elif (match := _NAME.match(name)) and match["stem"] in stems:
            entry = sets.setdefault((match["format"], match["variant"] or match["old_variant"]), _Set())
            if match["number"] is None:
                entry.single = path
            else:
                entry.shards = [*(entry.shards or ()), path]
    return sets


def _first(files: _Set) -> str:
    return files.single or files.index or (files.shards or ["?"])[0]


def _pick_variant(component: str, found: Mapping[str | None, _Set], variant: str | None) -> tuple[str | None, str | None]:
    """(the variant to take or _NONE, a note or fault)."""
    if variant in found:
        return variant, None
    if variant is not None and None in found:
        return None, f"{component}: has no {variant!r} files; its plain ones are used"
    others = sorted(name for name in found if name is not None)
    if variant is None and len(others) == 1:
        return others[0], f"{component}: has only {others[0]!r} files; they are used"
    wanted = "plain" if variant is None else repr(variant)
    return _NONE, f"{component}: has no {wanted} weights; there is {', '.join(others)}: choose with --variant"


def _files(
    component: str, files: _Set, listing: Sequence[str], read_text: Callable[[str], str], *, prefer_index: bool,
) -> tuple[list[str], str | None]:
    if files.single and not (files.index and prefer_index):
        return [files.single], None
    if files.index:
        shards, fault = _index_shards(component, files.index, read_text)
        if fault:
            return [], fault
        missing = [shard for shard in shards if shard not in set(listing)]
        if missing:
            return [], f"{component}: {basename(files.index)} names shards that are not there: {', '.join(map(basename, missing))}"
        return shards, None
    first = basename(_first(files))
    return [], f"{component}: has shards ({first}, ...) but not their index file, so what they hold together is unknown"


def _index_shards(component: str, index: str, read_text: Callable[[str], str]) -> tuple[list[str], str | None]:
    try:
        weight_map = json.loads(read_text(index))["weight_map"]
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if basename(name) != name or "\\" in name]
        names[0]  # an index of nothing is damaged too
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        return [], f"{component}: {basename(index)} is damaged ({error or type(error).__name__}); fetch it again"
    if outside:
        return [], f"{component}: {basename(index)} names files outside the component's folder"
    return [f"{component}/{name}" for name in names], None


def _nothing(component: str, names: Sequence[str]) -> str:
    weights = [basename(path) for path in names if is_weight_file(path)]
    if not names:
        return f"{component}: its folder is missing"
    if weights:
        return f"{component}: none of its weight files has a name that its library loads ({', '.join(weights[:3])})"
    return f"{component}: its folder has no weights"
