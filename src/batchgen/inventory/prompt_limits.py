"""What a model takes beside sizes: how much of a prompt, a negative prompt or none, which pictures.

From its tokenizers' configs and its pipeline's source text. Imports neither torch nor diffusers. What nothing states stays
unknown, and then anything goes.
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

from batchgen.inventory.records import ModelFacts
from batchgen.inventory.rules import tokenizers

_PICTURES = {"image": "image", "last_image": "last_image", "mask": "mask_image", "strength": "strength"}  # column -> argument
# Pipelines that read a list of pictures as references of one prompt, where others read it as a batch. Their signatures do not tell.
_SEVERAL = ("QwenImageEditPlusPipeline", "Flux2Pipeline", "Flux2KleinPipeline")
SEVERAL_IMAGES = "several images"  # beside the columns: `image` may name more than one
_SISTER_KINDS = ("Img2Img", "Inpaint", "ImageToVideo")
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
    """Which of a manifest's picture columns the model takes; all of them for a class whose source is not known.

    Its pipeline's own call says so, or the library's sister of that pipeline which is made from the same components.
    """
    own = facts.pipeline_class or ""
    arguments = set(call_arguments(own))
    known = bool(arguments)
    for name in _sisters(own):
        arguments |= set(call_arguments(name))
    several = {SEVERAL_IMAGES} if own in _SEVERAL or not known else set()
    return frozenset(column for column, argument in _PICTURES.items() if not known or argument in arguments) | several


def _sisters(own: str) -> list[str]:
    """Pipelines for the same model with a picture: they need no component that the model's own pipeline does not have."""
    found = _class_source(own)
    if found is None:
        return []
    mine = _components_of(found[1])
    names = [own.replace("Pipeline", f"{kind}Pipeline") for kind in _SISTER_KINDS]
    sisters = {name: _class_source(name, found[0].parent) for name in names if name != own}
    return [name for name, sister in sisters.items() if sister is not None and _components_of(sister[1]) <= mine]


def _components_of(source: str) -> set[str]:
    """Parameters of the constructor, without plain settings (those with a default that is not None)."""
    return {name for name, default in _arguments_in(source, "__init__").items() if default is None}


@lru_cache(maxsize=16)
def _class_source(class_name: str, folder: Path | None = None) -> tuple[Path, str] | None:
    """The file of a diffusers pipeline class and its source text; `folder`: only there."""
    spec = importlib.util.find_spec("diffusers")  # finds the folder, imports nothing
    if spec is None or not spec.submodule_search_locations or not class_name.isidentifier():
        return None
    root = Path(spec.submodule_search_locations[0], "pipelines")
    for path in sorted(folder.glob("*.py") if folder is not None else root.glob("*/*.py")):
        _, line, source = path.read_text(encoding="utf-8").partition(f"\nclass {class_name}(")
        if line:
            return path, source.partition("\nclass ")[0]
    return None


def call_arguments(class_name: str) -> Mapping[str, object]:
    """Arguments of a diffusers pipeline's call with their defaults (None for what is no plain constant), from its source text."""
    found = _class_source(class_name)
    return _arguments_in(found[1]) if found is not None else {}


def _arguments_in(source: str, method: str = "__call__") -> dict[str, object]:
    """Only the signature is parsed: the files are long, and this is read before every run."""
    _, line, rest = source.partition(f"    def {method}(")
    for end in re.finditer(r"\)(?=\s*(->[^\n]*)?:\n)", rest) if line else ():
        try:
            (node,) = ast.parse(f"def signature({rest[: end.start()]}): ...").body
        except SyntaxError:
            continue
        assert isinstance(node, ast.FunctionDef)
        return _with_defaults(node.args)
    return {}


def _with_defaults(arguments: ast.arguments) -> dict[str, object]:
    found: dict[str, object] = {argument.arg: None for argument in (*arguments.args[1:], *arguments.kwonlyargs)}
    plain = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    for argument, default in (
        *zip(plain, arguments.defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ):
        if isinstance(default, ast.Constant):
            found[argument.arg] = default.value
    return found
