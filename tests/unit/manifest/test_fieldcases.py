"""Failures that people reported of other batch renderers, each with the right outcome. The numbers are those of the collection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from manifestkit import CASES, faults_of, jobs_of, options, places, warned, write

from batchgen.errors import ManifestError
from batchgen.inventory.records import SizeRules
from batchgen.manifest import check, jobs

WAN = SizeRules(width_multiple=16, height_multiple=16, frames_step=4, frames_offset=1, is_video=True)


def test_b01_a_byte_order_mark_is_no_part_of_the_header() -> None:
    made = jobs_of(CASES / "b01_bom.csv")
    assert [(job.prompt, job.seed) for job in made] == [("a red kite over a grey sea", 1), ("a blue kite", 2)]
    assert not any("\ufeff" in job.as_json() for job in made)


@pytest.mark.parametrize("name", ["marked.tsv", "marked.jsonl", "marked.txt", "marked.json"])
def test_b01_nor_of_the_first_row_of_any_other_kind(tmp_path: Path, name: str) -> None:
    text = {".tsv": "prompt\tseed\nа kite\t1\n", ".jsonl": '{"prompt": "а kite", "seed": 1}\n', ".txt": "а kite\n",
            ".json": '[{"prompt": "а kite", "seed": 1}]'}[Path(name).suffix]
    (made,) = jobs_of(write(tmp_path / name, b"\xef\xbb\xbf" + text.encode()))
    assert made.prompt == "а kite"


def test_b02_bytes_that_are_not_utf8_are_named_with_line_and_offset() -> None:
    (fault,) = faults_of(CASES / "b02_cp1252.csv")
    assert (fault.row, fault.kind, fault.value) == (2, "encoding", "0xE9")
    assert "byte 17" in fault.message
    assert "--encoding cp1252" in fault.fix


def test_b02_the_named_encoding_gives_every_character() -> None:
    made = jobs_of(CASES / "b02_cp1252.csv", encoding="cp1252")
    assert [job.prompt for job in made] == ["a café table – “morning” light", "a naïve painting, 5 € note"]


def test_b04_a_semicolon_file_with_commas_in_its_prompts() -> None:
    made = jobs_of(CASES / "b04_semicolon.csv")
    assert [(job.prompt, job.negative_prompt, job.guidance, job.seed) for job in made] == [
        ("a fox, snow, pine trees, dusk", "blurry, low contrast", 7.5, 11), ("a hare, meadow, morning, mist", "blurry", 6.0, 12),
    ]


@pytest.mark.parametrize(("name", "first"), [("b04_tab.tsv", "a fox, snow; pine trees"), ("b04_tab_named_csv.csv", "a fox, snow, pines")])
def test_b04_the_header_line_alone_says_the_delimiter(name: str, first: str) -> None:
    made = jobs_of(CASES / name)
    assert (made[0].prompt, [job.seed for job in made]) == (first, [11, 12])


def test_b04_rows_longer_than_the_header_are_faults_that_say_what_to_do() -> None:
    faults = faults_of(CASES / "b04_single_col_commas.csv")
    assert places(faults) == [(2, None, "too-many-fields"), (3, None, "too-many-fields")]
    assert all("quotes" in fault.fix and ".txt" in fault.fix for fault in faults)


def test_b04_a_decimal_comma_counts_only_between_semicolons(tmp_path: Path) -> None:
    assert places(faults_of(write(tmp_path / "a.csv", 'prompt,guidance\na fox,"7,5"\n'))) == [(2, "guidance", "number")]


def test_b05_a_sep_line_is_honoured_and_counted() -> None:
    made = jobs_of(CASES / "b05_sepline.csv")
    assert [(job.prompt, job.seed, job.row) for job in made] == [("a lighthouse, storm", 21, 3), ("a lighthouse, calm", 22, 4)]


def test_b07_a_blank_seed_turns_no_other_into_a_float() -> None:
    made = jobs_of(CASES / "b07_seed_float_blank.csv")
    assert [job.seed for job in made[:1] + made[2:]] == [9007199254740993, 42, 42]
    assert made[1].seed_source == "identity"
    assert [job.steps for job in made] == [20, 20, None, 30]


def test_b08_words_for_missing_values_are_prompts() -> None:
    made = jobs_of(CASES / "b08_na_words.csv")
    assert [job.prompt for job in made] == ["None", "NA", "null", "nan", "NULL", "n/a", "true", "007", "1e5"]


def test_b10_seeds_are_exact_or_refused() -> None:
    faults = faults_of(CASES / "b10_seeds.csv")
    assert [(fault.row, fault.value) for fault in faults] == [
        (10, "18446744073709551616"), (11, "-9223372036854775809"), (13, "42.5"), (14, "1e3"), (15, "0x2A"), (17, "1,234"), (20, "nan"),
    ]
    made = jobs_of(CASES / "b10_seeds.csv", skip_invalid=True)
    assert {job.id: job.seed for job in made if job.seed_source == "row"} == {
        "s01": 0, "s02": 2**32 - 1, "s03": 2**32, "s04": 9007199254740993, "s05": 2**63 - 1, "s06": 2**63, "s07": 2**64 - 1, "s10": 42,
        "s14": 7,
    }
    assert {job.id: job.seed_source for job in made if job.seed_source != "row"} == {"s00": "drawn", "s16": "drawn", "s17": "identity"}


def test_b11_quotes_and_line_ends_inside_quotes_are_decoded() -> None:
    made = jobs_of(CASES / "b11_quotes_newline.csv")
    assert [job.prompt for job in made] == ['a sign that says "OPEN", night', "a poem page:\nline one\nline two", "trailing comma, ok"]
    assert [job.row for job in made] == [2, 3, 6]


def test_b11_an_unclosed_quote_is_named_where_it_opens_and_swallows_nothing() -> None:
    assert places(faults_of(CASES / "b11_unclosed_quote.csv")) == [(3, None, "unclosed-quote")]
    assert [job.seed for job in jobs_of(CASES / "b11_unclosed_quote.csv", skip_invalid=True)] == [64, 66, 67]


def test_b11_an_inch_mark_is_text_and_a_shifted_seed_is_a_fault() -> None:
    assert places(faults_of(CASES / "b11_inch_marks.csv")) == [(3, None, "too-many-fields")]
    (made,) = jobs_of(CASES / "b11_inch_marks.csv", skip_invalid=True)
    assert (made.prompt, made.seed) == ('a 12" record on a shelf', 68)


def test_b13_a_text_file_of_windows_with_blanks_and_comments() -> None:
    made = jobs_of(CASES / "b13_blank_crlf.txt")
    # white space at the ends is kept, as everything in a prompt is, and told
    assert [job.prompt for job in made] == ["a jar of honey", "a jar of salt  ", "\ta jar of sand", "last line, no newline"]
    assert [job.row for job in made] == [2, 5, 7, 8]
    found = check(str(CASES / "b13_blank_crlf.txt"), options())
    assert {notice.kind: notice.count for notice in found.warnings} == {"blank-rows": 3, "comments": 1, "outer-space": 2}


@pytest.mark.parametrize("name", ["b13_only_blank.txt", "b13_zero_bytes.csv", "b13_header_only.csv"])
@pytest.mark.parametrize("skip_invalid", [False, True])
def test_b13_no_jobs_at_all_is_an_error(name: str, skip_invalid: bool) -> None:
    assert [fault.kind for fault in faults_of(CASES / name, skip_invalid=skip_invalid)] == ["no-jobs"]


def test_b13_blank_rows_are_skipped_and_a_seed_without_a_prompt_is_a_fault() -> None:
    assert places(faults_of(CASES / "b13_empty_cells.csv")) == [(3, "prompt", "empty-prompt"), (4, "prompt", "empty-prompt")]
    assert check(str(CASES / "b13_empty_cells.csv"), options(skip_invalid=True)).rows == 4
    made = jobs_of(CASES / "b13_empty_cells.csv", allow_empty_prompt=True)
    assert [(job.prompt, job.seed) for job in made] == [("a jar", 1), ("", 2), ("", 3), ("a tin", 4)]


def test_b14_an_id_twice_is_a_fault_and_one_that_differs_in_case_is_told() -> None:
    assert places(faults_of(CASES / "b14_dupes.csv")) == [(3, "id", "duplicate-id")]
    made = jobs_of(CASES / "b14_dupes.csv", dedupe=True, name_template="{id}")
    assert [job.seed for job in made] == [81, 81, 81, 83, 84]
    assert len({job.output.casefold() for job in made}) == 5
    kinds = warned(CASES / "b14_dupes.csv", dedupe=True)
    assert (kinds["dropped"], kinds["id-case"]) == ((3, 8), (6,))


def test_b14_equal_rows_get_two_files_two_ids_and_two_keys(tmp_path: Path) -> None:
    made = jobs_of(write(tmp_path / "a.csv", "prompt,seed\na bell,84\na bell,84\n"), name_template="{id}")
    assert [job.id for job in made] == [made[0].id, f"{made[0].id}-1"]
    assert warned(tmp_path / "a.csv") == {"same-picture": (3,)}


def test_b17_syntax_of_web_uis_is_told_once_a_kind_and_never_touched() -> None:
    made = jobs_of(CASES / "b17_a1111.txt")
    assert [job.prompt for job in made] == (CASES / "b17_a1111.txt").read_text().splitlines()
    assert warned(CASES / "b17_a1111.txt") == {
        "weight": (1,), "lora-tag": (2,), "wildcard": (3,), "choice": (4,), "escape": (5,), "break": (6,),
    }


def test_b19_a_missing_negative_prompt_is_none_and_takes_the_default() -> None:
    assert [job.negative_prompt for job in jobs_of(CASES / "b19_missing_negative.csv")] == ["blurry", None, None, None]
    made = jobs_of(CASES / "b19_missing_negative.csv", negative_prompt="noise")
    assert [job.negative_prompt for job in made] == ["blurry", "noise", "noise", "noise"]


def test_b20_every_script_survives_and_a_nul_is_a_fault() -> None:
    assert places(faults_of(CASES / "b20_emoji.txt")) == [(6, None, "nul")]
    text = (CASES / "b20_emoji.txt").read_bytes().decode().split("\n")
    assert [job.prompt for job in jobs_of(CASES / "b20_emoji.txt", skip_invalid=True)] == text[:5]


@pytest.mark.parametrize("command", ["check", "jobs"])
def test_b20_the_locale_changes_nothing(command: str) -> None:
    def said(**locale: str) -> bytes:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
        code = (
            "import sys; from batchgen.manifest import *; o = ManifestOptions(skip_invalid=True); p = sys.argv[1]; "
            "sys.stdout.buffer.write('\\n'.join(job.as_json() for job in jobs(p, o)).encode())"
        )
        words = ["-m", "batchgen", "check", "--skip-invalid"] if command == "check" else ["-c", code]
        done = subprocess.run(
            [sys.executable, *words, str(CASES / "b20_emoji.txt")], env=environment | locale, stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    assert said(LC_ALL="C", PYTHONUTF8="0") == said(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") == said(LC_ALL="C.UTF-8", PYTHONUTF8="1")


@pytest.mark.parametrize("template", ["{slug}", "{prompt}", "{index:06d}-{slug}", "{seed}-{prompt}"])
def test_b22_names_of_long_prompts_are_cut_by_bytes_and_stay_apart(tmp_path: Path, template: str) -> None:
    made = jobs_of(CASES / "b22_long_unicode.csv", name_template=template)
    for job in made:
        # the temp and sidecar forms of a name have to fit, too
        assert max(len(part.encode()) for part in job.output.split("/")) <= 200
        write(tmp_path / job.output, b"x")
    assert len({job.output.casefold() for job in made}) == len(made) == 5


@pytest.mark.parametrize("template", ["{id}", "{prompt}", "{id}/{prompt}", "{index:06d}-{slug}"])
def test_b23_no_prompt_or_id_leaves_the_folder_or_makes_one(tmp_path: Path, template: str) -> None:
    made = jobs_of(CASES / "b23_slash.csv", name_template=template)
    assert [job.id for job in made] == ["p1", "p2", "../p3", "/srv/p4", "p5\\q", ".hidden", "-rf", ".."]
    folder = tmp_path / "outputs"
    for job in made:
        assert job.output.count("/") == template.count("/")
        assert not job.output.startswith(("-", ".", "/"))
        assert "\\" not in job.output
        assert (folder / job.output).resolve().is_relative_to(folder)


def test_b28_long_texts_and_any_script_reach_the_job_whole(tmp_path: Path) -> None:
    prompts = ["テスト 🎂 prompt", "word " * 2000, "c" * 1_100_000]
    lines = "".join(json.dumps({"id": f"m{n}", "prompt": prompt, "seed": n}, ensure_ascii=False) + "\n" for n, prompt in enumerate(prompts))
    assert [job.prompt for job in jobs_of(write(tmp_path / "b28.jsonl", lines))] == prompts


def test_b29_sizes_the_model_cannot_make_are_told_with_the_nearest_that_it_can() -> None:
    faults = faults_of(CASES / "b29_video_size.csv", rules=WAN)
    assert [(fault.row, fault.column, fault.value) for fault in faults] == [(2, "width", "853"), (3, "height", "360"), (5, "width", "854")]
    assert "848 or 864" in faults[0].fix
    made = jobs_of(CASES / "b29_video_size.csv", rules=WAN, snap=True)
    assert [(job.width, job.height, job.num_frames, job.fps) for job in made] == [
        (848, 480, 17, 16.0), (640, 368, 17, 16.0), (832, 480, 17, 16.0), (848, 480, 17, 24.0),
    ]
    assert [job.snapped for job in made] == [(("width", 853),), (("height", 360),), (), (("width", 854),)]


def test_b32_picture_k_of_a_row_has_seed_plus_k() -> None:
    assert places(faults_of(CASES / "b32_batch.csv")) == [(4, "num_images", "range")]
    made = jobs_of(CASES / "b32_batch.csv", skip_invalid=True)
    assert [(job.id, job.k, job.seed) for job in made] == [
        ("n4", 0, 200), ("n4", 1, 201), ("n4", 2, 202), ("n4", 3, 203), ("n1", 0, 202),
        ("nbig", 0, 2**64 - 2), ("nbig", 1, 2**64 - 1), ("nbig", 2, 0), ("nbig", 3, 1),
    ]


def test_jobs_refuse_what_check_refuses() -> None:
    with pytest.raises(ManifestError):
        list(jobs(str(CASES / "b10_seeds.csv"), options()))
