"""Tokenizers for models whose own files are not at hand: they read nothing and give a stated number of tokens.

Only lengths matter to a rehearsal. Where a pipeline pads to a fixed length, so does the stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchEncoding

# Longest inputs of tokenizers with a fixed length, by class: https://huggingface.co/docs/transformers (CLIP: 77 positions).
_MAX_LENGTHS = {"CLIPTokenizer": 77, "CLIPTokenizerFast": 77, "T5Tokenizer": 512, "T5TokenizerFast": 512}


class StandInTokenizer:
    """Gives `tokens` tokens for every text, padded or cut as it is asked to."""

    pad_token_id = 0
    eos_token_id = 1
    bos_token_id = 2
    pad_token = "<pad>"  # noqa: S105  a token of text
    eos_token = "</s>"  # noqa: S105
    padding_side = "right"
    chat_template = None

    def __init__(self, name: str, tokens: int) -> None:
        self.name = name
        self.tokens = tokens
        self.added_tokens_encoder: dict[str, int] = {}  # no textual inversions
        self.model_max_length = _MAX_LENGTHS.get(name, 4096)

    def __call__(
        self, text: str | Sequence[str] | None = None, *args: Any, padding: Any = False, max_length: int | None = None,
        truncation: Any = False, return_length: bool = False, **more: Any,
    ) -> BatchEncoding:
        """`input_ids` and `attention_mask`, both [texts, length]."""
        rows = 1 if text is None or isinstance(text, str) else len(text)
        limit = max_length or self.model_max_length
        real = min(self.tokens, limit) if truncation or padding == "max_length" else self.tokens
        length = limit if padding == "max_length" else real
        ids = torch.full((rows, length), 3, dtype=torch.long)
        mask = torch.zeros((rows, length), dtype=torch.long)
        mask[:, :real] = 1
        data = {"input_ids": ids, "attention_mask": mask}
        if return_length:
            data["length"] = torch.full((rows,), length)
        return BatchEncoding(data)

    def apply_chat_template(self, conversation: Any, *args: Any, tokenize: bool = True, return_dict: bool = False, **more: Any) -> Any:
        """One text a conversation, or its tokens."""
        many = bool(conversation) and isinstance(conversation[0], list | tuple)
        texts: Any = ["text"] * len(conversation) if many else "text"
        if not tokenize:
            return texts
        encoded = self(texts, **{key: value for key, value in more.items() if key in {"padding", "max_length", "truncation"}})
        return encoded if return_dict else encoded["input_ids"]

    def tokenize(self, text: str, **more: Any) -> list[str]:
        return ["text"] * self.tokens

    def batch_decode(self, sequences: Any, *args: Any, **more: Any) -> list[str]:
        return ["text"] * len(sequences)

    def decode(self, *args: Any, **more: Any) -> str:
        return "text"

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return 3 if isinstance(tokens, str) else [3] * len(tokens)

    def encode(self, *args: Any, **more: Any) -> list[int]:
        return [3] * self.tokens

    def __len__(self) -> int:
        return 32000


def stand_in_tokenizer(class_name: str, tokens: int) -> StandInTokenizer:
    return StandInTokenizer(class_name, tokens)
