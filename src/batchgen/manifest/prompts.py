"""What in a prompt looks like another tool's language.

Nothing is ever acted on: the text goes to the model as it stands, and the user is told.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

from batchgen.manifest.notices import NoticeLog

_SYNTAX = re.compile(
    r"(?P<lora_tag><(?:lora|lyco|lycoris|hypernet):[^<>\n]*>)"
    r"|(?P<wildcard>(?<!\w)__[\w/*-]+?__(?!\w))"
    r"|(?P<choice>\{[^{}\n]*(?:\||\$\$)[^{}\n]*\})"
    r"|(?P<break>\bBREAK\b)"
    r"|(?P<flag>(?:^|(?<=\s))--[a-zA-Z][\w-]*)"
    r"|(?P<escape>\\[()\[\]])"
    r"|(?P<weight>\([^()\n]{1,200}:\s*[0-9]*\.?[0-9]+\s*\)|\(\([^()\n]+\)|\[[^\[\]\n]+\])"
)
_TRIGGERS = ("<", "__", "{", "BREAK", "--", "\\", "(", "[")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f]")


def scan(lines: Sequence[int], prompts: Sequence[str], notices: NoticeLog) -> None:
    """Adds a notice for each kind of foreign syntax, with the rows it stands in."""
    joined = "".join(prompts)
    # one search over all of them says in most files that there is nothing to find
    triggers = [trigger for trigger in _TRIGGERS if trigger in joined]
    if triggers:
        for line, prompt in zip(lines, prompts, strict=True):
            if any(trigger in prompt for trigger in triggers):
                _scan_one(line, prompt, notices)
    if not joined.isprintable() and _CONTROL.search(joined):
        for line, prompt in zip(lines, prompts, strict=True):
            if not prompt.isprintable() and _CONTROL.search(prompt):
                notices.add("control-characters", line)
    if any(map(operator.ne, prompts, map(str.strip, prompts))):
        for line, prompt in zip(lines, prompts, strict=True):
            if prompt != prompt.strip():
                notices.add("outer-space", line)


def _scan_one(line: int, prompt: str, notices: NoticeLog) -> None:
    seen = set()
    for match in _SYNTAX.finditer(prompt):
        kind = (match.lastgroup or "").replace("_", "-")
        if kind not in seen:
            seen.add(kind)
            notices.add(kind, line, match.group()[:80])
