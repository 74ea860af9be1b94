"""Every kind of manifest gives its prompts as they stand, with rows as an editor counts them, and names what it cannot read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from manifestkit import CASES, faults_of, jobs_of, options, places, warned, write

from batchgen.errors import ManifestError, UsageError
from batchgen.manifest import check, jobs
from batchgen.manifest.blocks import BLOCK_BYTES

QUIRKS = [
    "moss", '"S T O P" painted in thick letters on a wall', 'a sign that says "Open Late" at the edge of a road', "dogs at a table ",
    "a whole field, quoted",
]


def test_a_benchmark_list_keeps_every_field_as_it_stands() -> None:
    made = jobs_of(CASES / "quirks.tsv")
    assert [job.prompt for job in made] == QUIRKS
    assert made[2].extra == (("Category", "Outdoor"), ("Challenge", "Writing"), ("Note", 'Longest word: "a note with quotes."'))
    kinds = warned(CASES / "quirks.tsv")
    assert (kinds["quotes-kept"], kinds["outer-space"]) == ((3,), (5,))


def test_nested_columns_are_carried_as_json_and_names_make_a_scorers_tree() -> None:
    made = jobs_of(CASES / "nested.jsonl", name_template="{index:05d}/samples/{k:04d}", num_images=4)
    assert [job.output for job in made[:5]] == [*(f"00000/samples/000{k}.png" for k in range(4)), "00001/samples/0000.png"]
    assert dict(made[4].extra) == {
        "tag": "counting", "include": '[{"class": "cow", "count": 3}]', "exclude": '[{"class": "cow", "count": 4}]',
    }
    assert dict(made[8].extra)["weight"] == "1.10"


def test_a_folder_is_read_in_natural_order_with_stems_as_ids() -> None:
    made = jobs_of(CASES / "one_a_file", name_template="{id}")
    assert [(job.id, job.output, job.prompt, job.row) for job in made] == [
        ("0", "0.png", "A field of cabbages, in the soft light of morning.", 1), ("2", "2.png", "A bench\nwith two lines.", 2),
        ("10", "10.png", "Ten.", 3),
    ]


def test_a_folders_faults_name_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"caf\xe9")
    write(tmp_path / "b.txt", "good")
    write(tmp_path / "c.txt", "\n")
    assert [(Path(fault.file).name, fault.kind) for fault in faults_of(tmp_path)] == [("a.txt", "encoding"), ("c.txt", "empty-prompt")]
    assert [job.id for job in jobs_of(tmp_path, skip_invalid=True)] == ["b"]


def test_a_folder_without_text_files_is_refused(tmp_path: Path) -> None:
    assert [fault.kind for fault in faults_of(tmp_path)] == ["no-jobs"]


SAME = {
    "a.csv": 'prompt,seed\n"one, two",3\nfour,\n',
    "a.tsv": "prompt\tseed\none, two\t3\nfour\t\n",
    "a.jsonl": '{"prompt": "one, two", "seed": 3}\n\n{"prompt": "four"}\n',
    "a.ndjson": '{"prompt": "one, two", "seed": 3}\r\n{"prompt": "four", "seed": null}\r\n',
    "a.json": ' [ {"prompt": "one, two", "seed": 3},\n {"seed": "", "prompt": "four"} ]\n',
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_rows_in_any_kind_are_the_same_jobs(tmp_path: Path, name: str) -> None:
    made = jobs_of(write(tmp_path / name, SAME[name]))
    want = jobs_of(write(tmp_path / "want" / "a.csv", SAME["a.csv"]))
    assert [(job.key, job.seed, job.prompt, job.output) for job in made] == [(job.key, job.seed, job.prompt, job.output) for job in want]


def test_what_is_no_text_is_told_in_words_that_fit_it(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": [b"a ring"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": ["a"]}\n{"prompt": {"a": 1}}\n{"prompt": 1}\n')
    found = [faults_of(tmp_path / name) for name in ("a.parquet", "b.jsonl")]
    assert [(fault.message, fault.fix) for faults in found for fault in faults] == [
        ("is bytes, not text", "write it as one text"), ("is a list, not text", "write it as one text"),
        ("is an object, not text", "write it as one text"), ("is a number, not text", "put it in quotes"),
    ]


def test_parquet_gives_its_columns_as_they_are(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({
        "prompt": ["one, two", "NA", "four"], "seed": pyarrow.array([2**64 - 1, None, 3], pyarrow.uint64()), "tags": [["a"], [], None],
        "guidance": [7.5, None, 4.0],
    })
    parquet.write_table(table, tmp_path / "a.parquet")
    made = jobs_of(tmp_path / "a.parquet")
    assert [(job.prompt, job.guidance, job.row) for job in made] == [("one, two", 7.5, 1), ("NA", None, 2), ("four", 4.0, 3)]
    assert [job.seed for job in made if job.seed_source == "row"] == [2**64 - 1, 3]
    assert [dict(job.extra)["tags"] for job in made] == ['["a"]', "[]", ""]
    assert [fault.kind for fault in faults_of(write(tmp_path / "b.parquet", b"PAR1 no"))] == ["parquet"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_byte_order_mark_says_the_encoding(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "a.csv", "prompt,seed\r\nnaïve 猫,1\r\n".encode(encoding))
    assert [(job.prompt, job.seed) for job in jobs_of(path)] == [("naïve 猫", 1)]


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark_is_told_and_can_be_named(tmp_path: Path, codec: str) -> None:
    path = write(tmp_path / "a.csv", "prompt,seed\na cat,1\n".encode(codec))
    assert "--encoding" in faults_of(path)[0].fix
    assert [job.prompt for job in jobs_of(path, encoding=codec)] == ["a cat"]


@pytest.mark.parametrize("asked", ["klingon", "base64"])
def test_an_unknown_encoding_is_a_usage_error(asked: str) -> None:
    with pytest.raises(UsageError, match="--encoding"):
        check(str(CASES / "b01_bom.csv"), options(encoding=asked))


def test_the_place_of_a_bad_byte_is_exact_far_into_a_file(tmp_path: Path) -> None:
    good = "prompt\n" + "".join(f"line {n} é\n" for n in range(40_000))
    data = good.encode() + b"bad \xff here\nmore\n"
    assert len(data) > 3 * BLOCK_BYTES
    (fault,) = faults_of(write(tmp_path / "a.csv", data))
    assert (fault.row, fault.value) == (40_002, "0xFF")
    assert f"byte {data.index(0xFF)} " in fault.message


def test_a_character_across_two_blocks_is_whole(tmp_path: Path) -> None:
    head = "prompt\n" + "x" * (BLOCK_BYTES - 8)
    assert [job.prompt for job in jobs_of(write(tmp_path / "a.csv", head + "é猫🐈\nlast"))] == [head[7:] + "é猫🐈", "last"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_every_line_end_counts_as_editors_count(tmp_path: Path, line_end: str) -> None:
    path = write(tmp_path / "a.csv", line_end.join(["prompt,seed", "a,1", "", '"b', 'c",2', "d,x", ""]))
    assert places(faults_of(path)) == [(6, "seed", "number")]
    made = jobs_of(path, skip_invalid=True)
    assert [(job.row, job.prompt) for job in made] == [(2, "a"), (4, f"b{line_end}c")]


def test_only_lf_ends_a_json_line(tmp_path: Path) -> None:
    text = '{"prompt": "a\u2028b\u0085c"}\n{"prompt": "d"}\n'
    assert [(job.row, job.prompt) for job in jobs_of(write(tmp_path / "a.jsonl", text))] == [(1, "a\u2028b\u0085c"), (2, "d")]


def test_only_line_ends_split_a_text_file(tmp_path: Path) -> None:
    text = "one\u2028still one\x0bstill\r\ntwo\rthree\n"
    assert [(job.row, job.prompt) for job in jobs_of(write(tmp_path / "a.txt", text))] == [
        (1, "one\u2028still one\x0bstill"), (2, "two"), (3, "three"),
    ]


JSON_FAULTS = {
    "a key twice": ('{"prompt": "a", "seed": 1, "seed": 2}', "'seed' stands twice"),
    "a nested key twice": ('{"prompt": "a", "meta": {"x": 1, "x": 2}}', "'x' stands twice"),
    "NaN": ('{"prompt": "a", "guidance": NaN}', "NaN is not JSON"),
    "Infinity": ('{"prompt": "a", "guidance": -Infinity}', "-Infinity is not JSON"),
    "a list": ('["a"]', "not an object"),
    "a string": ('"a"', "not an object"),
    "cut off": ('{"prompt": "a"', "not JSON"),
    "a comma too many": ('{"prompt": "a",}', "not JSON"),
    "too deep": ('{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "endless digits": ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "too many digits"),
}


@pytest.mark.parametrize("case", JSON_FAULTS)
def test_a_broken_json_line_is_that_rows_fault(tmp_path: Path, case: str) -> None:
    line, message = JSON_FAULTS[case]
    path = write(tmp_path / "a.jsonl", f'{{"prompt": "good"}}\n{line}\n{{"prompt": "last"}}\n')
    (fault,) = faults_of(path)
    assert (fault.row, fault.kind) == (2, "json")
    assert message in fault.message
    assert [job.prompt for job in jobs_of(path, skip_invalid=True)] == ["good", "last"]


@pytest.mark.parametrize(
    ("text", "row", "message"),
    [
        ('{"prompt": "a"}', 1, "not a JSON array"), ("", 1, "empty"), ('[{"prompt": "a"}', 1, "does not end"),
        ('[{"prompt": "a"}\n{"prompt": "b"}]', 2, "expected a comma"), ('[\n{"prompt": "a"},\n{"prompt" "b"}]', 3, "not JSON"),
        ('[{"prompt": "a"}]\nmore', 2, "after the array"), ('[{"prompt": "a"},\n7]', 2, "not an object"),
        ('[{"prompt": "a"},\n{"prompt": NaN},{"prompt": "c"}]', 2, "NaN"), ('[{"prompt": "a"},]', 1, "not JSON"),
    ],
)
def test_a_broken_json_array_is_named_with_its_line(tmp_path: Path, text: str, row: int, message: str) -> None:
    faults = faults_of(write(tmp_path / "a.json", text))
    assert [(fault.row, fault.kind) for fault in faults] == [(row, "json")]
    assert message in faults[0].message


def test_faults_of_a_json_array_name_the_element_for_many_may_stand_on_one_line(tmp_path: Path) -> None:
    text = '[{"prompt": "a"}, {"prompt": "b", "seed": "x"}, {"prompt": "c"}, {"prompt": "d", "width": -3}, 4, {"prompt": "e", "prompt": "f"}]'
    faults = faults_of(write(tmp_path / "a.json", text))
    assert [fault.item for fault in faults] == [2, 4, 5, 6]
    assert str(faults[0]).endswith("a.json:1:seed: item 2: is not a whole number ('x'); write digits only, or leave it blank")
    lines = faults_of(write(tmp_path / "a.jsonl", '{"prompt": "b", "seed": "x"}\n'))
    assert [fault.item for fault in lines] == [None]


def test_a_json_array_larger_than_a_block_is_read_piece_by_piece(tmp_path: Path) -> None:
    prompts = ["é" * 70_000, "b" * 3 * BLOCK_BYTES, *(f"row {n}" for n in range(2000))]
    text = json.dumps([{"prompt": prompt, "seed": n} for n, prompt in enumerate(prompts)], indent=1)
    assert [(job.prompt, job.seed) for job in jobs_of(write(tmp_path / "a.json", text))] == [(prompt, n) for n, prompt in enumerate(prompts)]


def test_a_quoted_field_larger_than_a_block_is_one_field(tmp_path: Path) -> None:
    prompts = ["x" * 200_000, "line\n" * 60_000, "short"]
    text = "prompt,seed\n" + "".join(f'"{prompt}",{n}\n' for n, prompt in enumerate(prompts))
    made = jobs_of(write(tmp_path / "a.csv", text))
    assert [(job.prompt, job.seed) for job in made] == [(prompt, n) for n, prompt in enumerate(prompts)]
    assert [job.row for job in made] == [2, 3, 60_004]


def test_an_unclosed_quote_in_a_long_file_costs_one_row(tmp_path: Path) -> None:
    quote = '"'
    text = "prompt,more,seed\n" + "".join(f"{quote if n == 7 else ''}a thing of some length, {n:060d},{n}\n" for n in range(4_000))
    path = write(tmp_path / "a.csv", text)
    assert places(faults_of(path)) == [(9, None, "unclosed-quote")]
    assert check(str(path), options(skip_invalid=True)).jobs == 3_999


def test_nul_bytes_are_named_with_line_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'prompt,seed\na,1\n"b\nc\0",2\nd,3\n')
    (fault,) = faults_of(path)
    assert (fault.row, fault.kind) == (4, "nul")
    assert "byte 2 of the line" in fault.message
    assert [job.prompt for job in jobs_of(path, skip_invalid=True)] == ["a", "d"]


@pytest.mark.parametrize(
    ("name", "given", "option"),
    [
        ("a.prompts", {}, "--format"), ("a.csv", {"format": "xlsx"}, "--format"), ("a.csv", {"format": "folder"}, "--format"),
        ("missing.csv", {}, "MANIFEST"), ("a.csv", {"delimiter": "::"}, "--delimiter"), ("a.csv", {"name_template": "{nope}"}, "--name"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(tmp_path: Path, name: str, given: dict[str, str], option: str) -> None:
    if not name.startswith("missing"):
        write(tmp_path / name, "prompt\na\n")
    with pytest.raises(UsageError) as caught:
        check(str(tmp_path / name), options(**given))
    assert (caught.value.option, caught.value.exit_code) == (option, 2)


def test_what_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(UsageError, match="read twice"):
        check(str(tmp_path / "a.csv"), options())


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.csv", "prompt\na\n")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert [fault.kind for fault in faults_of(path)] == ["unreadable"]


def test_format_and_delimiter_override_the_name_and_the_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.list", "prompt|seed\na, b|3\n")
    assert [(job.prompt, job.seed) for job in jobs_of(path, format="csv", delimiter="|")] == [("a, b", 3)]


def test_limit_takes_the_first_rows_and_looks_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,seed\na,1\n\nb,2\nc,bad\n")
    assert [job.prompt for job in jobs_of(path, limit=2)] == ["a", "b"]


def test_rows_that_skip_invalid_leaves_out_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,seed\na,1\n,2\nc,bad\nd,4\n")
    summary = check(str(path), options(skip_invalid=True))
    assert [(row.index, row.row) for row in summary.skipped] == [(1, 3), (2, 4)]
    assert "the prompt is empty" in summary.skipped[0].reason
    assert [(job.index, job.prompt) for job in jobs(str(path), options(skip_invalid=True))] == [(0, "a"), (3, "d")]


def test_many_faults_are_all_counted_and_all_written_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,seed,steps\n" + "a,x,0\n" * 5_500)
    with pytest.raises(ManifestError) as caught:
        check(str(path), options(faults_file=str(tmp_path / "faults.txt")))
    error = caught.value
    assert (error.total, len(error.message.splitlines())) == (11_000, 51)
    assert "10950 more faults (in all, number: 5500, range: 5500)" in error.message
    assert "--faults-file" in str(error)
    written = (tmp_path / "faults.txt").read_text(encoding="utf-8").splitlines()
    assert len(written) == 11_000
    assert written[-1].startswith(f"{path}:5501:steps: ")
