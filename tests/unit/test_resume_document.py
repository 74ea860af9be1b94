"""docs/resume.md names what the code has."""

from __future__ import annotations

from pathlib import Path

from batchgen.journalreader import STATES
from batchgen.outputs.metadata import PLAIN_KEYS, RECORD

TEXT = (Path(__file__).parents[2] / "docs" / "resume.md").read_text("utf-8")


def test_states_and_keys_are_all_there() -> None:
    for name in (*STATES, *PLAIN_KEYS, RECORD):
        assert f"`{name}`" in TEXT, name


def test_status_keys_are_all_there() -> None:
    from tests.unit.report.test_status import SCHEMA

    for name in SCHEMA:
        assert f"`{name}`" in TEXT, name


def test_exit_codes_are_all_there() -> None:
    from batchgen import errors

    codes = [errors.EXIT_DONE, errors.EXIT_STOPPED, errors.EXIT_REFUSED, errors.EXIT_SOME_FAILED, *errors.EXIT_SIGNALS.values()]
    line = TEXT[TEXT.index("Exit codes: ") :]
    assert all(str(code) in line for code in codes)
