"""docs/quickstart.md: its commands run one after the other, and print what the page shows, numbers and places aside."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("quickstart", ROOT / "tools" / "docs" / "quickstart.py")
assert spec is not None
assert spec.loader is not None
quickstart = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quickstart)


def shape_of(text: str) -> list[str]:
    """The lines without what differs from machine to machine: numbers, times, sizes, widths of columns, the processor's name."""
    # whether kernels round alike in a batch and alone is the processor's affair
    text = re.sub(r"at most 1/255 apart: it was made in a batch of \d+, and alone now", "the pixels are equal", text)
    text = re.sub(r"\d[\d.,]*", "#", text)
    text = re.sub(r"(# h )?(# min )?# s\b", "#time", text)
    text = re.sub(r"# ([KMG]i)?B\b", "#size", text)
    text = re.sub(r"(?m)^cpu: .*$", "cpu", text)
    return [re.sub(r"[ ─]+", " ", line).strip() for line in text.splitlines()]


def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    page = quickstart.PAGE.read_text(encoding="utf-8")
    shown = quickstart.examples(page)
    assert len(shown) >= 9
    for (line, expected), (played, code, printed) in zip(shown, quickstart.played(page, tmp_path), strict=True):
        assert line == played
        if line == "batchgen doctor":  # as machines differ; a failure of this one is its own affair
            assert code in (0, 1)
            assert {"python", "devices", "output disk", "hub token", "video encoder"} <= set(re.findall(r"(?m)^(?:ok|warning|FAILURE) +(\w+(?: \w+)?)", printed))
            continue
        assert code == 0, line
        assert shape_of(printed) == shape_of(expected), line


def test_every_page_that_it_names_is_there() -> None:
    page = quickstart.PAGE.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([\w./-]+\.md)\)", page):
        assert (quickstart.PAGE.parent / target).is_file(), target
