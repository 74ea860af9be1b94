"""Stand-in tokenizers: lengths as pipelines ask for them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
from batchgen.rehearsal.standins import stand_in_tokenizer

ASKED: dict[str, tuple[str, dict[str, Any], tuple[int, int], int]] = {
    "CLIP pads and cuts to 77": ("CLIPTokenizer", {"padding": "max_length", "truncation": True}, (2, 77), 77),
    "T5 pads to what is asked": ("T5TokenizerFast", {"padding": "max_length", "max_length": 256, "truncation": True}, (2, 256), 94),
    "others give their tokens": ("Qwen2Tokenizer", {"padding": True}, (2, 94), 94),
    "a shorter limit cuts": ("Qwen2Tokenizer", {"truncation": True, "max_length": 20}, (2, 20), 20),
}


@pytest.mark.parametrize(("name", "asked", "shape", "real"), ASKED.values(), ids=ASKED.keys())
def test_lengths(name: str, asked: dict[str, Any], shape: tuple[int, int], real: int) -> None:
    found = stand_in_tokenizer(name, 94)(["a", "b"], **asked)
    assert tuple(found["input_ids"].shape) == tuple(found["attention_mask"].shape) == shape
    assert found["attention_mask"].sum(dim=1).tolist() == [real, real]


def test_what_prompt_conversion_asks() -> None:
    stand_in = stand_in_tokenizer("CLIPTokenizer", 94)
    assert not any(token in stand_in.added_tokens_encoder for token in stand_in.tokenize("a boat"))
