"""What a manifest's reading warns of: each kind once, with the rows it was seen in."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

MESSAGES = {
    "blank-rows": "blank rows were skipped",
    "comments": "lines beginning with # are comments and were skipped",
    "quotes-kept": "a quote does not close at the end of its field; the field is kept as it is, quotes and all",
    "extra-columns": "columns carried into the results as they are",
    "id-case": "ids differ only in upper and lower case, or in composition, from an earlier one; their files get different names",
    "same-picture": "rows equal to an earlier one, seed included, give the same picture again",
    "dropped": "rows dropped by --dedupe: the id, or the row with its seed, stood before",
    "drawn": "seeds are drawn when the run begins, and recorded",
    "snapped": "sizes that the model cannot make were changed by --snap",
    "truncated": "prompts are longer than every text encoder reads; their ends are lost",
    "partly-read": "prompts are read whole by one text encoder and cut by another",
    "not-counted": "prompt lengths are not checked against tokenizers whose files are of no known kind",
    "negative-ignored": "the model takes no negative prompt; it does nothing",
    "default-negative-ignored": "the model takes no negative prompt; --negative-prompt does nothing",
    "frames-ignored": "the model makes pictures, not clips: frames and fps do nothing",
    "outer-space": "prompts begin or end with white space; it is kept",
    "control-characters": "prompts hold control characters; they are kept, and shown escaped",
    "weight": "(weights:1.3), ((emphasis)) and [brackets] in a prompt are plain text here",
    "escape": r"\( and \) in a prompt are plain text here, backslash and all",
    "lora-tag": "<lora:...> in a prompt is plain text here; use the lora column",
    "wildcard": "__wildcards__ in a prompt are plain text here",
    "choice": "{a|b} in a prompt is plain text here",
    "break": "BREAK in a prompt is plain text here",
    "flag": "pasted flags (--name) in a prompt are plain text here; columns and options set them",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning about a kind of thing, with the rows it was seen in (the first few) and how many there were."""

    kind: str
    message: str
    rows: tuple[int, ...] = ()
    count: int = 0
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.rows:
            counted = f"{self.message}: {self.count:,}" if self.count else self.message
            return f"{self.message}: {', '.join(self.examples)}" if self.examples else counted
        more = f" and {self.count - len(self.rows)} more" if self.count > len(self.rows) else ""
        return f"{self.message}: row{'s' if self.count > 1 else ''} {', '.join(map(str, self.rows))}{more}"


@dataclass(slots=True)
class _Seen:
    rows: list[int] = field(default_factory=list)
    count: int = 0
    examples: list[str] = field(default_factory=list)


class NoticeLog:
    """Notices by kind: each is told once, with its lowest row numbers and its first examples."""

    ROWS = 10
    EXAMPLES = 3

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def add(self, kind: str, row: int | None = None, example: str | None = None, count: int = 1) -> None:
        """Counts one more of a kind in MESSAGES."""
        seen = self._seen.setdefault(kind, _Seen())
        seen.count += count
        if row is not None:
            if len(seen.rows) < self.ROWS:
                seen.rows.append(row)
            elif row < max(seen.rows):
                seen.rows = heapq.nsmallest(self.ROWS, [*seen.rows, row])
        if example is not None and len(seen.examples) < self.EXAMPLES:
            seen.examples.append(example)

    def count(self, kind: str) -> int:
        return self._seen[kind].count if kind in self._seen else 0

    @property
    def notices(self) -> tuple[Notice, ...]:
        return tuple(
            Notice(kind, MESSAGES[kind], tuple(sorted(seen.rows)), seen.count, tuple(seen.examples)) for kind, seen in self._seen.items()
        )
