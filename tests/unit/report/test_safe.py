"""Untrusted text does not act on a terminal, nor hide from the reader."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.report.safe import printable

SHOWN = {
    "plain": ("a cat, naïve 猫 100 % {x} $HOME", "a cat, naïve 猫 100 % {x} $HOME"),
    "colour": ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
    "title": ("\x1b]0;evil\x07", "\\x1b]0;evil\\x07"),
    "8-bit control": ("\x9b31m", "\\x9b31m"),
    "line ends": ("a\r\nb\tc", "a\\r\\nb\\tc"),
    "direction": ("a\u202egnp.exe", "a\\u202egnp.exe"),
    "separators": ("a\u2028b", "a\\u2028b"),
    "half a pair": ("\ud800", "\\ud800"),
    "joined emoji": ("👩\u200d👧 नम\u200dस्ते", "👩\u200d👧 नम\u200dस्ते"),
    "spaces": ("a\u00a0b\u3000c", "a\u00a0b\u3000c"),
}


@pytest.mark.parametrize("case", SHOWN)
def test_what_acts_on_a_terminal_is_shown_as_an_escape(case: str) -> None:
    text, shown = SHOWN[case]
    assert printable(text) == shown


def test_line_ends_may_stay_and_long_texts_are_cut() -> None:
    assert printable("a\n\x1b", keep="\n") == "a\n\\x1b"
    assert printable("abcdef", limit=4) == "abc…"
    assert printable("abcd", limit=4) == "abcd"


@given(st.text())
def test_nothing_that_acts_is_left(text: str) -> None:
    assert not [char for char in printable(text) if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in "\u202e\u2066"]
    printable(text).encode()  # and a terminal's encoding takes it
