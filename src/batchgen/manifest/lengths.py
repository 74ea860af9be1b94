"""How much of a prompt the model's text encoders read, counted with their own tokenizers and without torch.

transformers' tokenizers load torch; the `tokenizers` and `sentencepiece` libraries under them do not. Folders of older models hold no
tokenizer.json but the files it is made from; for CLIP, Qwen and T5 it is put together here, as transformers does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from batchgen.inventory.prompt_limits import TextEncoderLimit

# (text, tokens that are read) -> (tokens in all, the text of those not read), special tokens left out
Measure = Callable[[str, int], tuple[int, str]]

_CLIP_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Lost:
    """A prompt that is too long for some encoder. `tail` is what the one that reads most does not read; empty if one reads all."""

    text: str  # which encoders read how many tokens of how many
    tail: str
    by_all: bool


@dataclass(frozen=True, slots=True)
class _Encoder:
    name: str
    room: int  # tokens of a prompt that it reads
    measure: Measure


class LengthCheck:
    """Counts prompts against every tokenizer of the model. `unread` names those whose files are of no known kind."""

    def __init__(self, limits: Sequence[TextEncoderLimit]) -> None:
        self._encoders: list[_Encoder] = []
        unread = []
        for limit in limits:
            made = _load(Path(limit.folder))
            if made is None:
                unread.append(limit.name)
            else:
                measure, special = made
                self._encoders.append(_Encoder(limit.name, limit.max_tokens - special, measure))
        self.unread = tuple(unread)
        self._safe_bytes = min((encoder.room for encoder in self._encoders), default=0) - 2

    def lost(self, prompt: str) -> Lost | None:
        """What is lost of the prompt, or None where every encoder reads all of it."""
        # a token stands for a byte at least, but for a word mark at the front
        size = len(prompt.encode("utf-8", "replace"))
        if not self._encoders or size <= self._safe_bytes:
            return None
        texts, tails, whole = [], [], bool(self.unread)
        for encoder in self._encoders:
            count, tail = (0, "") if size <= encoder.room - 2 else encoder.measure(prompt, encoder.room)
            if count <= encoder.room:
                whole = True
                continue
            texts.append(f"{encoder.name} reads {encoder.room} of {count} tokens")
            tails.append(tail)
        if not texts:
            return None
        return Lost("; ".join(texts), "" if whole else min(tails, key=len), not whole)


def _load(folder: Path) -> tuple[Measure, int] | None:
    """(how to measure a text, special tokens beside them); None for files of no known kind."""
    try:
        if (folder / "tokenizer.json").is_file():
            return _of_tokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return _of_bpe(folder)
        if (folder / "spiece.model").is_file():
            return _of_sentencepiece(folder / "spiece.model")
    except Exception:  # noqa: BLE001 - the Rust library raises bare Exception; a tokenizer it cannot read is one we cannot count with
        return None
    return None


def _of_tokenizer(tokenizer: Tokenizer) -> tuple[Measure, int]:
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def measure(text: str, room: int) -> tuple[int, str]:
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        return len(offsets), text[offsets[room][0] :] if len(offsets) > room else ""

    return measure, tokenizer.num_special_tokens_to_add(False)


def _of_bpe(folder: Path) -> tuple[Measure, int] | None:
    config: Mapping[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    if kind == "CLIPTokenizer":
        tokenizer = Tokenizer(models.BPE.from_file(*files, end_of_word_suffix="</w>", unk_token="<|endoftext|>"))  # noqa: S106 - a token
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])
        return _of_tokenizer(tokenizer)[0], 2
    if kind == "Qwen2Tokenizer":
        tokenizer = Tokenizer(models.BPE.from_file(*files))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
        return _of_tokenizer(tokenizer)
    return None


def _of_sentencepiece(file: Path) -> tuple[Measure, int]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(file))

    def measure(text: str, room: int) -> tuple[int, str]:
        ids = model.encode(text)
        return len(ids), str(model.decode(ids[room:]))

    return measure, 1  # T5 ends a text with </s>
