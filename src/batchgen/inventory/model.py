"""What a model is made of: from model_index.json, component configs and safetensors headers alone.

No torch, no diffusers, no weights read, no code of the model run. A hub id is resolved once to a commit and its snapshot folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from batchgen import builtin
from batchgen.errors import ModelError, UsageError
from batchgen.inventory import index as index_files
from batchgen.inventory import safetensors, weights
from batchgen.inventory.index import IndexEntry, ModelIndex
from batchgen.inventory.meant import meant
from batchgen.inventory.options import DTYPES, ModelOptions, OnProgress
from batchgen.inventory.records import ComponentFacts, ModelFacts, Platform, WeightFile

BUILTIN = "builtin"


__all__ = [
    "BUILTIN", "DTYPES", "ModelOptions", "OnProgress", "component_config", "folder_facts", "list_files", "looks_like_hub_id", "resolve",
]


def resolve(source: str, options: ModelOptions, *, platform: Platform, on_progress: OnProgress | None = None) -> ModelFacts:
    """Facts of a model folder, a hub id or `builtin`. Raises ModelError with all that is wrong."""
    if source == BUILTIN:
        try:
            place = Path(builtin.folder())
        except FileNotFoundError as error:
            raise ModelError(str(error)) from error
        return folder_facts(place, options, platform=platform, source=source, kind="builtin")
    path = Path(source).expanduser()
    if path.is_file():
        raise index_files.single_file(path) if weights.is_weight_file(path.name) else ModelError(
            f"{path} is a file, not a model folder", hint="Pass the folder that holds model_index.json.")
    if path.is_dir():
        return folder_facts(path, options, platform=platform, source=source, kind="folder")
    if not looks_like_hub_id(source):
        raise ModelError(
            f"there is no model folder {source!r}, and it is no hub id (OWNER/NAME){meant(source)}",
            hint="--model takes a folder in diffusers' layout, a hub id like Qwen/Qwen-Image, or builtin.")
    # huggingface_hub costs a second to import: only for hub ids.
    from batchgen.inventory import hub

    snapshot = hub.snapshot(source, options, on_progress=on_progress)
    try:
        facts = folder_facts(
            snapshot.folder, options, platform=platform, source=source, kind="hub", revision=snapshot.commit,
            headers=snapshot.headers, listing=snapshot.listing,
        )
    except ModelError as error:
        if not snapshot.notes:
            raise
        raise ModelError(error.message, hint=error.hint or "The cache may be incomplete: run once with a connection.") from error
    return replace(facts, notes=(*snapshot.notes, *facts.notes))


def looks_like_hub_id(source: str) -> bool:
    """OWNER/NAME as the hub allows it: two parts of letters, digits, `-`, `_` and `.`."""
    parts = source.split("/")
    return len(parts) == 2 and all(
        part and part[0] not in "-." and all(char.isascii() and (char.isalnum() or char in "-_.") for char in part) for part in parts
    )


def folder_facts(
    folder: Path, options: ModelOptions, *, platform: Platform, source: str, kind: str, revision: str | None = None,
    headers: Callable[[str], safetensors.FileHeader] | None = None, listing: dict[str, int] | None = None,
) -> ModelFacts:
    """Facts of a folder. `headers` and `listing` stand in for files that were not downloaded (a hub id that is only planned)."""
    folder = folder.resolve()
    index = index_files.read_index(folder, trust_remote_code=options.trust_remote_code)
    _check_component_dtypes(index, options)
    files = listing if listing is not None else list_files(folder)
    faults: list[str] = []
    notes: list[str] = []
    parts: list[ComponentFacts] = []
    other: list[str] = []
    revision_hash = hashlib.sha256()
    for entry in index.entries:
        config = component_config(folder, entry.name)
        if entry.weightless:
            other.append(entry.name)
            if not any(path.startswith(entry.name + "/") for path in files):
                faults.append(f"{entry.name}: its folder is missing")
            continue
        if fault := _needs_consent(entry, config, options):
            faults.append(fault)
            continue
        chosen = weights.choose(
            entry.name, entry.library, list(files), lambda path: (folder / path).read_text(encoding="utf-8"),
            variant=options.variant, allow_pickle=options.allow_pickle,
        )
        if chosen.fault:
            faults.append(chosen.fault)
            continue
        if chosen.note:
            notes.append(chosen.note)
        try:
            parts.append(_component(entry, config, chosen, folder, files, options, platform, headers, revision_hash))
        except ModelError as error:
            faults.append(f"{entry.name}: {error.message}")
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise ModelError(f"the model in {folder} cannot be loaded:\n{listed}\n{_what_exists(index, parts)}".rstrip())
    return ModelFacts(
        source=source, kind=kind, folder=str(folder),  # type: ignore[arg-type]
        revision=revision or folder_revision(folder, files, revision_hash), pipeline_class=index.pipeline_class,
        components=tuple(parts), other=tuple(other), absent=index.absent, notes=tuple(notes), index=index.settings,
    )


def _what_exists(index: ModelIndex, parts: Sequence[ComponentFacts]) -> str:
    lines = [f"  {part.name}: {len(part.files)} file(s){f', variant {part.variant}' if part.variant else ''}" for part in parts]
    lines += [f"  {name}: absent (null in the index)" for name in index.absent]
    return "\n".join(["what is there:", *lines]) if lines else ""


def list_files(folder: Path) -> dict[str, int]:
    """Size of every file in the folder and its direct sub-folders, by POSIX path."""
    found: dict[str, int] = {}
    for path in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found


def component_config(folder: Path, name: str) -> dict[str, object]:
    """A component's config.json; empty where it has none. Raises ModelError for one that is damaged."""
    path = folder / name / "config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}", hint="Fetch the file again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object", hint="Fetch the file again.")
    return content


def _needs_consent(entry: IndexEntry, config: dict[str, object], options: ModelOptions) -> str | None:
    if config.get("auto_map") and entry.class_name.startswith("Auto") and not options.trust_remote_code:
        return f"{entry.name}: its config.json brings code of its own (auto_map); look at it, then pass --trust-remote-code"
    return None


def _component(
    entry: IndexEntry, config: dict[str, object], chosen: weights.Chosen, folder: Path, files: dict[str, int], options: ModelOptions,
    platform: Platform, headers: Callable[[str], safetensors.FileHeader] | None, revision_hash: hashlib._Hash,
) -> ComponentFacts:
    paths = tuple(WeightFile(path, files[path]) for path in chosen.files)
    if chosen.pickle:
        for file in paths:
            revision_hash.update(f"{file.path} {file.size_bytes}\n".encode())
        dtype = loaded_dtype(entry, config, {}, options, platform)
        return ComponentFacts(
            entry.name, entry.library, entry.class_name, None, None, dtype=dtype, variant=chosen.variant, files=paths, pickle=True)
    tensors: list[safetensors.TensorHeader] = []
    for file in paths:
        path = folder / file.path
        header = safetensors.read_header(path) if headers is None or path.is_file() else headers(file.path)
        revision_hash.update(f"{file.path} {file.size_bytes} {hashlib.sha256(header.raw).hexdigest()}\n".encode())
        tensors.extend(header.tensors)
    if not tensors:
        raise ModelError("its weight files hold no tensors")
    held = safetensors.without_ties(tensors, head_tied=_head_tied(config))
    stored: dict[str, int] = {}
    for tensor in held:
        stored[tensor.dtype] = stored.get(tensor.dtype, 0) + tensor.elements
    dtype = loaded_dtype(entry, config, stored, options, platform)
    quantised = "quantization_config" in config
    return ComponentFacts(
        entry.name, entry.library, entry.class_name,
        bytes_as_loaded=sum(tensor.bytes_as(None if quantised else dtype) for tensor in held),
        parameters=sum(tensor.elements for tensor in held),
        stored_dtypes=tuple(sorted(stored.items(), key=lambda item: -item[1])),
        dtype=dtype, variant=chosen.variant, files=paths,
    )


def _head_tied(config: dict[str, object]) -> bool:
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return bool(config.get("tie_word_embeddings", inner if inner is not None else False))


def loaded_dtype(
    entry: IndexEntry, config: dict[str, object], stored: dict[str, int], options: ModelOptions, platform: Platform,
) -> str:
    """The dtype a component loads in, by torch's name.

    The user's word for the component, then for all. Automatic: float32 on the CPU; on an accelerator bfloat16, except for a
    VAE that is stored in float32 (Wan's and others lose their quality in 16 bits, and it is small).
    """
    for name, dtype in options.component_dtypes:
        if name == entry.name and dtype != "auto":
            return DTYPES[dtype]
    if options.dtype not in (None, "auto"):
        return DTYPES[str(options.dtype)]
    if platform == "cpu":
        return "float32"
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    wide = sum(count for dtype, count in stored.items() if dtype in {"F32", "F64"})
    stored_wide = wide * 2 > sum(stored.values())
    is_vae = "Autoencoder" in entry.class_name or entry.name == "vae" or entry.name.endswith("_vae")
    if is_vae and stored_wide and said not in {"bfloat16", "float16"}:
        return "float32"
    return "bfloat16"


def _check_component_dtypes(index: ModelIndex, options: ModelOptions) -> None:
    known = [entry.name for entry in index.entries if not entry.weightless]
    for name, _ in options.component_dtypes:
        if name not in known:
            raise UsageError(f"--dtype names {name!r}, which is no component of this model; it has {', '.join(known)}", option="--dtype")


# A config is small; what is larger beside the weights (sample pictures, other checkpoints) decides no pixel.
_CONFIG_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".spm")
_CONFIG_LIMIT_BYTES = 64 * 2**20


def folder_revision(folder: Path, files: Iterable[str], weights_hash: hashlib._Hash) -> str:
    """40 hex digits over a local folder's configs (content) and weight files (headers and sizes, hashed already)."""
    digest = hashlib.sha256(weights_hash.digest())
    for path in sorted(files):
        full = folder / path
        belongs = "/" in path or path == index_files.INDEX_NAME
        if belongs and path.endswith(_CONFIG_SUFFIXES) and full.stat().st_size <= _CONFIG_LIMIT_BYTES:
            digest.update(f"{path} {hashlib.sha256(full.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:40]
