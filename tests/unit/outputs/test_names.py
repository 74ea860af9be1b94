"""Names: from templates and untrusted texts to paths that every file system takes, each once, inside the folder."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import UsageError
from batchgen.outputs.names import COMPONENT_BYTES, Names, clean, name_key, numbered, parse_template, plan_name, slug, unique

FIELDS: dict[str, Any] = {
    "index": 7, "id": "cat-7", "prompt": "A red, red kite!", "seed": 2**64 - 1, "width": 832, "height": 480, "model": "Qwen-Image", "k": 2,
    "steps": 30, "category": "Food & Beverage",
}
EXPECTED = {
    "{index:06d}-{slug}": "000007-a-red-red-kite.png",
    "{index}": "7.png",
    "{index:03}_{k:02d}": "007_02.png",
    "{index:05d}/samples/{k:05d}": "00007/samples/00002.png",
    "{id}": "cat-7.png",
    "{id}.png": "cat-7.png",
    "{prompt}": "A red, red kite!.png",
    "{seed}_{width}x{height}": "18446744073709551615_832x480.png",
    "{model}/{category}/{steps}": "Qwen-Image/Food & Beverage/30.png",
    "{{{id}}}": "{cat-7}.png",
    "plain": "plain.png",
    " {ID} ": "cat-7.png",
}


@pytest.mark.parametrize("template", EXPECTED)
def test_a_template_gives_the_name(template: str) -> None:
    assert plan_name(template, FIELDS) == EXPECTED[template]


@pytest.mark.parametrize(
    ("template", "name"), [("{id}", "cat-7-2.png"), ("{index}-{k}", "7-2.png"), ("{id}/{slug}", "cat-7/a-red-red-kite-2.png")]
)
def test_several_pictures_of_a_row_are_told_apart(template: str, name: str) -> None:
    assert plan_name(template, FIELDS, pictures=3) == name


REFUSED = {
    "unknown field": "{nope}", "attribute": "{id.__class__}", "subscript": "{id[0]}", "conversion": "{id!r}", "format of a text": "{id:>9}",
    "float format": "{index:.2f}", "nested format": "{index:{k}}", "open brace": "a{", "closed brace": "a}b", "empty": "", "blank field": "{}",
    "absolute": "/tmp/{id}", "parent": "../{id}", "parent inside": "a/../{id}", "here": "./{id}", "empty folder": "a//{id}", "trailing slash": "{id}/",
    "backslash": "a\\{id}", "drive": "C:{id}", "control character": "a\n{id}", "question mark": "{id}?", "too deep": "a/" * 9 + "{id}",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_template_is_a_usage_error(case: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_template(REFUSED[case], columns=["category"])
    assert (caught.value.option, caught.value.exit_code) == ("--name", 2)


def test_columns_of_the_manifest_are_fields_however_they_are_written() -> None:
    template = parse_template("{sub_category}-{Sub Category}", columns=["Sub Category"])
    assert plan_name(template, FIELDS | {"sub_category": "x"}) == "x-x.png"


HOSTILE = [
    "..", ".", "", "/", "///", "../../etc/passwd", "/srv/x", "a/b", "a\\b", "C:\\x", ".hidden", "-rf", "~root", " ", "\t", "\n", "a\0b", "\x1b[31m", "con",
    "CON", "nul.txt", "COM1", "lpt9.tar.gz", "com¹", "CONIN$", "aux ", "trailing.", "trailing ", "a" * 500, "é" * 300, "🐈" * 100, "한" * 200, "{id}", "%s$HOME",
    "<>:\"|?*", "\u202egnp.exe", "e\u0301", "\ud800", "\uffff", "x.png", "_", "__", "-", "- -",
]


def is_legal(path: str) -> None:
    for part in path.split("/"):
        assert part
        assert 0 < len(part.encode()) <= COMPONENT_BYTES
        assert part not in (".", "..")
        assert not re.search(r'[\\:*?"<>|\x00-\x1f\x7f]', part)
        assert part[0] not in ".-~ "
        assert part[-1] not in ". "
        assert part == unicodedata.normalize("NFC", part)
        assert not re.fullmatch(r"(?i)(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?", part)


@pytest.mark.parametrize("template", ["{id}", "{prompt}", "{slug}", "x/{id}/{k}", "{id}-{prompt}", "{index:06d}-{slug}", "{id}{k}"])
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_hostile_text_gives_a_harmless_name(template: str, text: str) -> None:
    for extension in (".png", ""):
        path = plan_name(template, FIELDS | {"id": text, "prompt": text}, pictures=2, extension=extension)
        assert path.count("/") == template.count("/")
        is_legal(path)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=40) | st.sampled_from(HOSTILE), min_size=1, max_size=12))
def test_any_ids_give_legal_names_inside_the_folder_each_once(ids: list[str]) -> None:
    names = Names()
    planned = [names.claim(plan_name("{id}", FIELDS | {"id": name})) for name in ids]
    for path in planned:
        is_legal(path)
        assert Path("/out", path).parent == Path("/out")
    assert len({name_key(path) for path in planned}) == len(planned)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=6))
def test_any_ids_give_files_that_can_be_made(tmp_path_factory: pytest.TempPathFactory, ids: list[str]) -> None:
    folder = tmp_path_factory.mktemp("names")
    names = Names()
    for name in ids:
        path = folder / names.claim(plan_name("{id}/{prompt}", FIELDS | {"id": name, "prompt": name}))
        path.parent.mkdir(exist_ok=True)
        with path.open("x"):
            pass


def test_long_texts_that_differ_at_their_ends_get_different_names() -> None:
    for template in ("{prompt}", "{slug}", "{id}-{prompt}"):
        assert plan_name(template, FIELDS | {"prompt": "x" * 400 + "a"}) != plan_name(template, FIELDS | {"prompt": "x" * 400 + "b"})


def test_the_number_of_a_picture_and_the_index_are_never_cut_off() -> None:
    path = plan_name("{prompt}-{index:06d}", FIELDS | {"prompt": "y" * 400}, pictures=3)
    assert path.endswith("-000007-2.png")


SLUGS = {
    "A Red, RED kite!": "a-red-red-kite", "naïve café": "naïve-café", "e\u0301clair": "éclair", "नमस्ते दुनिया": "नमस्ते-दुनिया", "猫 on a roof": "猫-on-a-roof",
    "🙌✨": "untitled", "a cake 🎂 with candles 🕯️": "a-cake-with-candles", "1️⃣ first #️⃣": "1️⃣-first", "❤️": "untitled", "": "untitled", "--- f/2.8 ---": "f-2-8", "{a|b} $x %s": "a-b-x-s", "one " * 40: "one-one-one-one-one-one-one-one-one-one-one-one-one-one-one",
}


@pytest.mark.parametrize("text", SLUGS)
def test_a_slug_is_words(text: str) -> None:
    assert slug(text) == SLUGS[text]


def test_markup_braces_and_percent_signs_are_text() -> None:
    assert clean("{id} %s $HOME [b]x[/b]") == "{id} %s $HOME [b]x[_b]"


def test_names_that_some_file_system_confuses_are_told_apart() -> None:
    names = Names()
    given = ["A.png", "a.png", "é.png", "e\u0301.png", "É.png", "ß.png", "SS.png", "a_2.png", "a.png"]
    made = [names.claim(path) for path in given]
    assert made == ["A.png", "a_2.png", "é.png", "e\u0301_2.png", "É_3.png", "ß.png", "SS_2.png", "a_2_2.png", "a_3.png"]


def test_unique_asks_for_the_first_free_name() -> None:
    taken = {"x/a.png", "x/a_2.png"}
    assert unique("x/A.png", taken.__contains__) == "x/A_3.png"
    assert unique("x/b.png", taken.__contains__) == "x/b.png"
    assert numbered("x/" + "é" * 98 + ".png", 12).encode().__len__() - 2 <= COMPONENT_BYTES


@pytest.mark.parametrize(
    ("template", "counts"),
    [("{index:06d}-{slug}", True), ("{index}/{k}", True), ("{index}_{id}", True), ("{index}{id}", False), ("{index}", False), ("{id}-{index}", False),
     ("{index}-{seed}", False), ("{index}0{id}", False)],
)
def test_only_names_that_begin_with_the_index_need_no_register(template: str, counts: bool) -> None:
    assert parse_template(template).counts_rows is counts
