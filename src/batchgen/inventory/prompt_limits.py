"""What a model takes beside sizes: how much of a prompt, a negative prompt or none, which pictures.

From its tokenizers' configs and its pipeline's source text. Imports neither torch nor diffusers. What nothing states stays
unknown, and then anything goes.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from batchgen.inventory.records import ModelFacts
from batchgen.inventory.rules import tokenizers

_PICTURES = {"image": "image", "last_image": "last_image", "mask": "mask_image", "strength": "strength"}  # column -> argument
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


def pipeline_cut(class_name: str) -> int | None:
    """The default of `max_sequence_length` in a diffusers pipeline's call."""
    default = call_arguments(class_name).get("max_sequence_length")
    return default if isinstance(default, int) else None


def takes_negative_prompt(facts: ModelFacts) -> bool | None:
    """Whether the pipeline's call has a negative prompt; None for a class whose source is not known."""
    arguments = call_arguments(facts.pipeline_class or "")
    return "negative_prompt" in arguments if arguments else None


def picture_inputs(facts: ModelFacts) -> frozenset[str]:
    """Which of a manifest's picture columns the pipeline's call takes; all of them for a class whose source is not known."""
    arguments = call_arguments(facts.pipeline_class or "")
    return frozenset(column for column, argument in _PICTURES.items() if not arguments or argument in arguments)


@lru_cache(maxsize=8)
def call_arguments(class_name: str) -> Mapping[str, object]:
    """Arguments of a diffusers pipeline's call with their defaults (None for what is no plain constant), from its source text."""
    spec = importlib.util.find_spec("diffusers")  # finds the folder, imports nothing
    if spec is None or not spec.submodule_search_locations or not class_name.isidentifier():
        return {}
    for path in sorted(Path(spec.submodule_search_locations[0], "pipelines").glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        if f"class {class_name}(" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                return _arguments_in(node)
    return {}


def _arguments_in(node: ast.ClassDef) -> dict[str, object]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__call__":
            found: dict[str, object] = {argument.arg: None for argument in (*item.args.args[1:], *item.args.kwonlyargs)}
            plain = item.args.args[len(item.args.args) - len(item.args.defaults) :]
            for argument, default in (
                *zip(plain, item.args.defaults, strict=True), *zip(item.args.kwonlyargs, item.args.kw_defaults, strict=True),
            ):
                if isinstance(default, ast.Constant):
                    found[argument.arg] = default.value
            return found
    return {}
