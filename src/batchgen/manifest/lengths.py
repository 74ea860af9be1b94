"""How much of a prompt the model's text encoders read, counted with their own tokenizers and without torch.

transformers' tokenizers load torch; the `tokenizers` library under them does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from batchgen.inventory.prompt_limits import TextEncoderLimit


@dataclass(frozen=True, slots=True)
class Lost:
    """A prompt that is too long for some encoder. `tail` is what the one that reads most does not read; empty if one reads all."""

    text: str  # which encoders read how many tokens of how many
    tail: str
    by_all: bool


class LengthCheck:
    """Counts prompts against every tokenizer of the model."""

    def __init__(self, limits: Sequence[TextEncoderLimit]) -> None:
        self._encoders = [(limit, tokenizer) for limit in limits if (tokenizer := _load(limit)) is not None]
        self._safe_bytes = min((limit.max_tokens - 4 for limit, _ in self._encoders), default=0)

    def lost(self, prompt: str) -> Lost | None:
        """What is lost of the prompt, or None where every encoder reads all of it."""
        # a token stands for at least one byte, give or take a word mark at the front
        if not self._encoders or len(prompt) <= self._safe_bytes // 4 or len(prompt.encode("utf-8", "replace")) <= self._safe_bytes:
            return None
        texts, reach, whole = [], 0, 0
        for limit, tokenizer in self._encoders:
            encoded = tokenizer.encode(prompt, add_special_tokens=False)
            room = limit.max_tokens - tokenizer.num_special_tokens_to_add(False)
            if len(encoded.ids) <= room:
                whole += 1
                continue
            texts.append(f"{limit.name} reads {room} of {len(encoded.ids)} tokens")
            reach = max(reach, encoded.offsets[room][0])
        if not texts:
            return None
        return Lost("; ".join(texts), "" if whole else prompt[reach:], not whole)


def _load(limit: TextEncoderLimit) -> Tokenizer | None:
    file = Path(limit.folder) / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

