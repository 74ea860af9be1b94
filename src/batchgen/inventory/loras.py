"""LoRA files as the command line names them: found, looked at and fingerprinted before a model is touched. Loads no weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchgen.errors import ModelError, UsageError
from batchgen.inventory.safetensors import read_header

_GIVEN = re.compile(r"(?P<name>[^=]+)=(?P<path>.+?)(?::(?P<weight>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)))?")
_NAME = re.compile(r"[A-Za-z0-9_-]+")  # what peft takes as an adapter's name
_WORDS = ("lora", "alpha")  # of which a LoRA's tensor names have one
RESERVED = "none"


@dataclass(frozen=True, slots=True)
class LoraFile:
    """One `--lora`: a safetensors file under a name, with the weight that rows take where they say none."""

    name: str
    path: str  # absolute
    weight: float = 1.0


def parse_loras(values: Iterable[str]) -> tuple[LoraFile, ...]:
    """`NAME=PATH[:WEIGHT]` each. Raises UsageError for a bad spelling, a name given twice, or a file that is no LoRA."""
    found: dict[str, LoraFile] = {}
    for value in values:
        match = _GIVEN.fullmatch(value.strip())
        if match is None:
            raise UsageError(f"--lora {value!r} is not NAME=PATH or NAME=PATH:WEIGHT", option="--lora")
        name = match["name"].strip()
        if not _NAME.fullmatch(name) or name == RESERVED:
            raise UsageError(f"--lora: {name!r} cannot be a LoRA's name", option="--lora", hint="Use letters, digits, - and _.")
        if name in found:
            raise UsageError(f"--lora names {name!r} twice", option="--lora")
        weight = float(match["weight"]) if match["weight"] else 1.0
        found[name] = LoraFile(name, str(_file(name, Path(match["path"].strip()).expanduser())), weight)
    return tuple(found.values())


def _file(name: str, path: Path) -> Path:
    if path.is_dir():
        inside = sorted(path.glob("*.safetensors"))
        if len(inside) != 1:
            what = "no .safetensors file" if not inside else f"{len(inside)} .safetensors files"
            raise UsageError(f"--lora {name}: the folder {path} holds {what}", option="--lora", hint="Name the file itself.")
        path = inside[0]
    if path.suffix != ".safetensors":
        raise UsageError(f"--lora {name}: {path} is no .safetensors file", option="--lora", hint="Other formats can run code when loaded.")
    try:
        names = [tensor.name for tensor in read_header(path).tensors]
    except ModelError as error:
        raise UsageError(f"--lora {name}: {error.message}", option="--lora") from error
    if not any(word in key.lower() for key in names for word in _WORDS):
        raise UsageError(f"--lora {name}: {path} holds no LoRA weights", option="--lora")
    return path.resolve()


def fingerprint(lora: LoraFile) -> str:
    """16 hex digits of the file's content: another file under the same name gives other pictures."""
    digest = hashlib.sha256()
    with Path(lora.path).open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()[:16]
