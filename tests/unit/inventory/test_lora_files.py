"""LoRAs on the command line: spelling, files and fingerprints, before a model is touched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchgen.errors import UsageError
from batchgen.inventory.loras import LoraFile, fingerprint, parse_loras


@pytest.fixture
def style(tmp_path: Path) -> Path:
    path = tmp_path / "style v1:2.safetensors"
    save_file({"transformer.blocks.0.to_q.lora_A.weight": np.zeros((4, 8), np.float32)}, path)
    return path


SPELLINGS = {
    "a plain file": ("style={}", 1.0),
    "with a weight": ("style={}:0.8", 0.8),
    "a negative weight": ("style={}:-1", -1.0),
    "a weight without a leading nought": ("style={}:.5", 0.5),
    "spaces around": (" style = {} ", 1.0),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings(case: str, style: Path) -> None:
    text, weight = SPELLINGS[case]
    assert parse_loras([text.format(style)]) == (LoraFile("style", str(style.resolve()), weight),)


def test_a_folder_with_one_file_stands_for_it(style: Path) -> None:
    (found,) = parse_loras([f"style={style.parent}"])
    assert found.path == str(style.resolve())


REFUSED = {
    "no name": ("{}", "is not NAME=PATH"),
    "a name peft cannot take": ("my.style={}", "cannot be a LoRA's name"),
    "the word for going without": ("none={}", "cannot be a LoRA's name"),
    "no such file": ("style=/nowhere/x.safetensors", "cannot be read"),
    "a pickle": ("style=/nowhere/x.bin", r"is no \.safetensors file"),
    "other weights": ("style={}/model.safetensors", "holds no LoRA weights"),
    "two files": ("style={}/two", "holds 2 .safetensors files"),
    "no file": ("style={}/empty", "holds no .safetensors file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    text, message = REFUSED[case]
    (tmp_path / "two").mkdir()
    (tmp_path / "empty").mkdir()
    for name in ("model.safetensors", "two/a.safetensors", "two/b.safetensors"):
        save_file({"weight": np.zeros(2, np.float32)}, tmp_path / name)
    with pytest.raises(UsageError, match=message) as raised:
        parse_loras([text.format(tmp_path)])
    assert raised.value.option == "--lora"


def test_a_name_stands_once(style: Path) -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_loras([f"style={style}", f"style={style}"])


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    prints = []
    for number in (1, 1, 2):
        path = tmp_path / f"{len(prints)}.safetensors"
        save_file({"lora": np.full(4, number, np.float32)}, path)
        prints.append(fingerprint(LoraFile("x", str(path))))
    assert prints[0] == prints[1] != prints[2]
