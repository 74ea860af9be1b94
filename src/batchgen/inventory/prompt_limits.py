"""How many tokens of a prompt each text encoder of a model reads, from its tokenizers' configs and its pipeline's source text.

Imports neither torch nor diffusers. What nothing states stays unknown, and then nothing is said of a prompt's length.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from batchgen.inventory.records import ModelFacts
from batchgen.inventory.rules import tokenizers

_NO_LIMIT = 1_000_000  # transformers writes 10^30 for "none"


@dataclass(frozen=True, slots=True)
class TextEncoderLimit:
    """A tokenizer of the model and how many tokens of a prompt its encoder reads, special tokens included."""

    name: str  # its entry in model_index.json
    folder: str  # absolute
    max_tokens: int


def prompt_limits(facts: ModelFacts) -> tuple[TextEncoderLimit, ...]:
    """A limit for each tokenizer: the tokenizer's own, or the length the pipeline pads and cuts to where that is less."""
    cut = pipeline_cut(facts.pipeline_class) if facts.pipeline_class else None
    found = []
    for folder in tokenizers(facts):
        known = [tokens for tokens in (_own_limit(Path(folder)), cut) if tokens is not None]
        if known:
            found.append(TextEncoderLimit(Path(folder).name, folder, min(known)))
    return tuple(found)


def _own_limit(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    tokens = config.get("model_max_length") if isinstance(config, dict) else None
    return int(tokens) if isinstance(tokens, (int, float)) and 0 < tokens < _NO_LIMIT else None


@lru_cache(maxsize=8)
def pipeline_cut(class_name: str) -> int | None:
    """The default of `max_sequence_length` in a diffusers pipeline's call, read from its source text."""
    spec = importlib.util.find_spec("diffusers")  # finds the folder, imports nothing
    if spec is None or not spec.submodule_search_locations or not class_name.isidentifier():
        return None
    for path in sorted(Path(spec.submodule_search_locations[0], "pipelines").glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        if f"class {class_name}(" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                return _call_default(node)
    return None


def _call_default(node: ast.ClassDef) -> int | None:
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or item.name != "__call__":
            continue
        plain = item.args.args[len(item.args.args) - len(item.args.defaults) :]
        named = [*zip(plain, item.args.defaults, strict=True), *zip(item.args.kwonlyargs, item.args.kw_defaults, strict=True)]
        for argument, default in named:
            if argument.arg == "max_sequence_length" and isinstance(default, ast.Constant) and isinstance(default.value, int):
                return default.value
    return None
