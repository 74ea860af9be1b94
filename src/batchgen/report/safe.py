"""Untrusted text for a terminal: prompts, names and messages from libraries may hold commands to the terminal."""

from __future__ import annotations

import re
import unicodedata

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Direction marks and other invisible characters change what a reader sees; the joiners of emoji and Indic scripts do not.
_KEPT_FORMATS = "\u200c\u200d"


def printable(text: str, *, keep: str = "", limit: int | None = None) -> str:
    """`text` with every character that acts on a terminal shown as an escape: `\\x1b`, `\\u202e`. Those in `keep` (say, "\\n") stay.

    `limit`: at most so many characters, the last one an ellipsis. Give the result to rich as `Text`: brackets stay as they are.
    """
    if limit is not None and len(text) > limit:
        return printable(text[: max(limit - 1, 0)], keep=keep) + "…"
    if text.isascii():
        return text if text.isprintable() else _CONTROL.sub(lambda match: _escape(match.group(), keep), text)
    return "".join(char if _harmless(char) else _escape(char, keep) for char in text)


def _harmless(char: str) -> bool:
    return char.isprintable() or char in _KEPT_FORMATS or unicodedata.category(char) == "Zs"


def _escape(char: str, keep: str) -> str:
    return char if char in keep else ascii(char)[1:-1]
