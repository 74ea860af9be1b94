"""The built-in model's words: its vocabulary, its tokenizer and the extra words that a prompt may hold.

Every word the painter uses is one token. Byte pairs are merged along the words' beginnings, so that a word nobody
taught falls apart into a known beginning and letters, as with any other byte-pair vocabulary.
"""

from __future__ import annotations

import random
import string

from data import (
    BACKGROUND_FORMS,
    COLOUR_WORDS,
    OPENINGS,
    POSITION_WORDS,
    SHAPE_WORDS,
    SIZE_WORDS,
    Scene,
    describe,
    fragment,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Content is lowered and set off by a space: a word is the same token wherever it stands in a sentence.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    " {{ message['content'] | lower | replace('-', ' ') | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DECORATIONS = (
    "flat colors", "flat colours", "minimal", "simple", "vector art", "high quality", "highly detailed", "sharp edges", "no text",
    "nice", "beautiful", "clean", "on the canvas", "for a poster", "in this picture", "a logo", "an icon", "modern style",
    "plain and bold", "clear", "just one", "nothing else", "geometric", "best quality", "illustration", "as a sign", "for children",
    "very neat",
)  # fmt: skip
OTHER_WORDS = (
    "a", "an", "the", "is", "and", "in", "size", "shape", "thing", "figure", "object", "please", "with", "of", "it", "its", "one",
    "two", "not", "no", "that", "this", "which", "colored", "coloured", "colour", "color", "background", "side", "picture", "image",
    "bright", "dark", "light", "gray", "grey", "brown", "photo", "blurry", "ugly", "placed", "located", "sits", "corner", "half",
    "size:", "without", "behind", "under", "empty",
)  # fmt: skip
MAX_CONTENT_TOKENS = {32: 24, 64: 56}


def words() -> list[str]:
    """Every word with its own token, sorted."""
    tables = (COLOUR_WORDS, SHAPE_WORDS, SIZE_WORDS, POSITION_WORDS)
    phrases = [word for table in tables for alternatives in table.values() for word in alternatives]
    phrases += [f"{word}s" for alternatives in SHAPE_WORDS.values() for word in alternatives]
    phrases += [*BACKGROUND_FORMS, *OPENINGS, *DECORATIONS, *OTHER_WORDS]
    letters = str.maketrans("", "", string.punctuation)
    return sorted({word.translate(letters) for phrase in phrases for word in phrase.split()} - {""})


def build_tokenizer() -> Qwen2Tokenizer:
    """A Qwen2Tokenizer whose merges spell `words` from left to right."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    # Words of a sentence come first (they begin with the space's letter), so that no other pair can break them up.
    for spelling in (*(f"\u0120{word}" for word in words()), "user", "assistant"):
        for end in range(1, len(spelling)):
            merged = spelling[: end + 1]
            if merged not in vocabulary:
                vocabulary[merged] = len(vocabulary)
                merges.append((spelling[:end], spelling[end]))
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = 512
    return tokenizer


def chat(prompt: str, tokenizer: Qwen2Tokenizer) -> str:
    """The text that the pipeline's text encoder reads for a prompt."""
    message = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=True))


def training_prompt(scene: Scene, rng: random.Random, long: bool = False) -> str:
    """What training says about a scene: mostly a sentence, now and then one property or nothing at all."""
    kind = rng.random()
    if kind < 0.08:
        return ""
    if kind < 0.15:
        return fragment(scene, rng)
    parts = [describe(scene, rng)]
    for _ in range(rng.randint(6, 14) if long else rng.random() < 0.08):
        parts.insert(rng.randint(0, len(parts)), rng.choice(DECORATIONS))
    prompt = ", ".join(parts)
    if rng.random() < 0.04:  # a word nobody knows must not spoil the rest
        spaced = prompt.split(" ")
        spaced.insert(rng.randint(0, len(spaced)), "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 5))))
        prompt = " ".join(spaced)
    return prompt
