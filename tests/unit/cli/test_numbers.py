"""What is refused as a number, and that the words say what to write instead."""

from __future__ import annotations

import click
import pytest

from batchgen.cli.numbers import FiniteRange, WholeRange

WHOLE, OPEN, FINITE = WholeRange(1, 9), FiniteRange(min=0, min_open=True), FiniteRange(min=0.1)


@pytest.mark.parametrize(
    ("kind", "value", "number"),
    [(WHOLE, "1", 1), (WHOLE, "9", 9), (WHOLE, 5, 5), (WHOLE, " 7 ", 7), (OPEN, "1e-9", 1e-9), (FINITE, "0.1", 0.1), (FINITE, 3, 3.0)],
)
def test_what_lies_within_the_limits_is_taken(kind: click.ParamType, value: object, number: float) -> None:
    assert kind.convert(value, None, None) == number


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (WHOLE, "0", "outside 1 ... 9; write a whole number from 1 to 9"),
        (WHOLE, "10", "outside 1 ... 9"),
        (WHOLE, "1.0", "'1.0' is not a whole number; write digits only"),
        (WHOLE, "1e0", "not a whole number"),
        (WHOLE, True, "True is not a whole number"),
        (WHOLE, "", "'' is not a whole number"),
        (WHOLE, "1_0", "not a whole number"),
        (WHOLE, "9" * 5000, "not a whole number"),
        (WholeRange(1), "0", "0 is below 1; write a whole number of at least 1"),
        (OPEN, "0", "0 is not above 0; write a number above 0"),
        (OPEN, "nan", "'nan' is not a finite number"),
        (OPEN, "inf", "'inf' is not a finite number"),
        (OPEN, "9" * 400, "is not a finite number"),
        (OPEN, "seven", "'seven' is not a finite number; write it like 7.5"),
        (FINITE, "0", "0 is below 0.1; write a number of at least 0.1"),
    ],
)
def test_anything_else_is_refused_in_plain_words(kind: click.ParamType, value: object, words: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        kind.convert(value, None, None)
    assert words in caught.value.message
