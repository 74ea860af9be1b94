"""Headers, typed fields, ranges, defaults and identity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from manifestkit import faults_of, jobs_of, options, places, warned, write
from PIL import Image

from batchgen.errors import UsageError
from batchgen.inventory.loras import LoraFile
from batchgen.inventory.records import SizeRules
from batchgen.manifest import check, jobs
from batchgen.manifest.columns import COLUMNS, nearly_known, one_edit_apart
from batchgen.manifest.sizes import neighbours

HEADERS = {
    "aliases": ("text,negative,name,num_inference_steps,cfg,n,frames", {"prompt", "negative_prompt", "id", "steps", "guidance"}),
    "case, spaces and hyphens": ("PROMPT,Negative Prompt,ID,Num-Inference-Steps,Guidance Scale,Count,x", {"prompt", "steps", "guidance"}),
    "no-break spaces at the ends": ("\u00a0prompt\u00a0,\u00a0steps,a,b,c,d,e", {"prompt", "steps"}),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_is_matched_however_it_is_written(tmp_path: Path, case: str) -> None:
    header, fields = HEADERS[case]
    path = write(tmp_path / "a.csv", f"{header}\na cat,9,9,9,9,2,9\n")
    first, *rest = jobs_of(path, carry=("x", "a", "b", "c", "d", "e"))
    assert first.prompt == "a cat"
    assert ("steps" in fields) == (first.steps == 9)
    assert ("negative_prompt" in fields) <= (first.negative_prompt == "9")
    assert len(rest) == (1 if "n" in header.split(",") or "Count" in header else 0)


@pytest.mark.parametrize("heading", ["promt", "prompts", "propmt", "negativ_prompt", "sead", "seeds", "hight", "step", "guidanc", "num_image", "rompt"])
def test_a_heading_one_slip_from_a_known_one_is_an_error(heading: str) -> None:
    assert nearly_known(heading) is not None


@pytest.mark.parametrize(
    "heading", ["prompt_id", "image_url", "my_seed", "category", "note", "weight", "task", "idx", "tag", "label", "include", "x", "style", "source"]
)
def test_a_heading_of_its_own_is_carried(heading: str) -> None:
    assert nearly_known(heading) is None


@pytest.mark.parametrize(
    ("left", "right", "near"),
    [("prompt", "promt", True), ("prompt", "prompts", True), ("prompt", "pormpt", True), ("prompt", "pronpt", True), ("prompt", "prompt", False),
     ("prompt", "pmorpt", False), ("prompt", "prom", False), ("ab", "ba", True), ("", "a", True), ("abc", "abxc", True), ("abcd", "badc", False)],
)
def test_one_edit_is_one(left: str, right: str, near: bool) -> None:
    assert one_edit_apart(left, right) is near is one_edit_apart(right, left)


HEADER_FAULTS = {
    "a near miss": ("prompt,sead", [(1, "sead", "near-miss")]),
    "a near miss of the prompt": ("promt,seed", [(1, "promt", "near-miss")]),
    "two of one": ("prompt,cfg,guidance_scale", [(1, "guidance_scale", "two-columns")]),
    "prompt twice": ("prompt,Prompt ", [(1, "Prompt", "two-columns")]),
    "size beside width": ("prompt,size,width", [(1, "size", "two-columns")]),
    "nothing known": ("foo,bar", [(1, None, "no-prompt-column")]),
    "no prompt": ("foo,seed", [(1, None, "no-prompt-column")]),
}


@pytest.mark.parametrize("case", HEADER_FAULTS)
@pytest.mark.parametrize("skip_invalid", [False, True])
def test_a_wrong_header_stops_everything(tmp_path: Path, case: str, skip_invalid: bool) -> None:
    header, found = HEADER_FAULTS[case]
    assert places(faults_of(write(tmp_path / "a.csv", f"{header}\na,,\n"[: len(header) + 3]), skip_invalid=skip_invalid)) == found


def test_a_header_without_known_columns_says_what_it_found(tmp_path: Path) -> None:
    (fault,) = faults_of(write(tmp_path / "a.csv", "foo,bar\na,b\n"))
    assert "'foo', 'bar'" in fault.message
    assert "--prompt-column" in fault.fix


def test_header_faults_and_row_faults_are_told_together(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,sead,steps\na,1,0\n,2,3\n")
    assert places(faults_of(path)) == [(1, "sead", "near-miss"), (2, "steps", "range"), (3, "prompt", "empty-prompt")]


def test_the_prompt_column_can_be_named_and_a_near_miss_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "Scene,prompt,sead\na hill,other,7\n")
    (made,) = jobs_of(path, prompt_column="scene", carry=("sead",))
    assert (made.prompt, made.extra) == ("a hill", (("prompt", "other"), ("sead", "7")))


def test_a_json_object_with_a_slip_in_a_key_is_one_rows_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n{"promt": "b"}\n{"prompt": "c", "sead": 4}\n{"x": 1}\n{"prompt": "d", "cfg": 1, "guidance": 2}\n')
    assert places(faults_of(path)) == [
        (2, "promt", "near-miss"), (3, "sead", "near-miss"), (4, None, "no-prompt-column"), (5, "guidance", "two-columns"),
    ]
    assert [job.prompt for job in jobs_of(path, skip_invalid=True)] == ["a"]


@pytest.mark.parametrize("field", ["width", "height", "steps", "num_images", "num_frames"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e3", "0x10", "1_0", "４", "nan", "", "2147483648", "9" * 400, "--1"])
def test_whole_numbers_are_whole_and_positive(tmp_path: Path, field: str, value: str) -> None:
    path = write(tmp_path / "a.csv", f"prompt,{field}\na,{value}\n")
    if value == "":
        jobs_of(path)
    else:
        assert [fault.column for fault in faults_of(path)] == [field]


@pytest.mark.parametrize("field", ["guidance", "true_cfg_scale", "fps", "strength"])
@pytest.mark.parametrize(("value", "kind"), [("-0.1", "range"), ("nan", "number"), ("inf", "number"), ("1,5", "number"), ("1e5", "number"), ("x", "number"), ("9" * 400, "range")])
def test_numbers_are_plain_and_not_negative(tmp_path: Path, field: str, value: str, kind: str) -> None:
    path = write(tmp_path / "a.csv", f"prompt;{field}\na;{value}\n" if value != "1,5" else f'prompt,{field}\na,"{value}"\n')
    assert places(faults_of(path)) == [(2, field, kind)]


@pytest.mark.parametrize("value", ["0", "0.0", "0.0001", "0.0999", "1000.1", "12800", "1000000000"])
def test_a_rate_that_no_clip_can_hold_is_a_fault(tmp_path: Path, value: str) -> None:
    fine = "".join(f"a,{good}\n" for good in ("0.1", "1000", "23.976", ""))
    (fault,) = faults_of(write(tmp_path / "a.csv", f"prompt,FPS\n{fine}b,{value}\n"))
    assert (fault.row, fault.column, fault.value, fault.kind) == (6, "FPS", value, "range")
    assert "0.1 ... 1000" in fault.message


def test_strength_ends_at_one(tmp_path: Path) -> None:
    assert places(faults_of(write(tmp_path / "a.csv", "prompt,strength\na,1.01\n"))) == [(2, "strength", "range")]


@pytest.mark.parametrize(
    ("cell", "kind"),
    [("true", "type"), ("[7]", "type"), ('{"a": 7}', "type"), ("7.5", "number"), ("-3", "range"), ("1e3", "number"), (str(2**64), "range"), ("7.0", None),
     ('"7"', None), ("null", None), ('""', None), (str(2**64 - 1), None), ('"random"', None), ("-1", None)],
)
def test_json_seeds_are_exact_whatever_their_type(tmp_path: Path, cell: str, kind: str | None) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"prompt": "a", "seed": {cell}}}\n')
    if kind is not None:
        assert places(faults_of(path)) == [(1, "seed", kind)]
        return
    (made,) = jobs_of(path)
    assert made.seed_source != "row" or made.seed == int(float(cell.strip('"'))) or made.seed == 2**64 - 1


@pytest.mark.parametrize("cell", ["5", "true", '["a"]', '{"a": 1}'])
def test_a_prompt_is_text(tmp_path: Path, cell: str) -> None:
    assert places(faults_of(write(tmp_path / "a.jsonl", f'{{"prompt": {cell}}}\n'))) == [(1, "prompt", "type")]


@pytest.mark.parametrize("field", ["prompt", "negative_prompt", "id", "note"])
@pytest.mark.parametrize(("escape", "kind"), [("\\u0000", "nul"), ("\\ud800", "unicode"), ("\\udc00 x", "unicode")])
def test_what_no_file_can_hold_is_a_fault_in_every_text(tmp_path: Path, field: str, escape: str, kind: str) -> None:
    row = '"prompt": "a", ' if field != "prompt" else ""
    path = write(tmp_path / "a.jsonl", f'{{"prompt": "good"}}\n{{{row}"{field}": "x{escape}"}}\n')
    assert places(faults_of(path)) == [(2, field, kind)]


def test_a_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert [job.prompt for job in jobs_of(write(tmp_path / "a.jsonl", '{"prompt": "\\ud83d\\udc08"}\n'))] == ["🐈"]


@pytest.mark.parametrize("written", ["640x480", " 640 X 480 ", "640×480"])
def test_size_is_width_and_height(tmp_path: Path, written: str) -> None:
    made = jobs_of(write(tmp_path / "a.csv", f"prompt,size\na,{written}\nb,\n"), width=512, height=256)
    assert [(job.width, job.height) for job in made] == [(640, 480), (512, 256)]


@pytest.mark.parametrize("written", ["640", "640x", "x480", "0x480", "640x480x3", "99999999999x1"])
def test_what_is_no_size_is_a_fault(tmp_path: Path, written: str) -> None:
    assert [fault.column for fault in faults_of(write(tmp_path / "a.csv", f"prompt,size\na,{written}\n"))] == ["size"]


def test_rows_win_over_the_runs_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,width,steps,guidance,n,seed,negative\na,640,,0,,,\nb,,5,,3,9,bad\n")
    first, *rest = jobs_of(path, width=512, height=384, steps=20, guidance=4.0, num_images=2, seed=70, negative_prompt="noise", fps=8.0)
    assert (first.width, first.height, first.steps, first.guidance, first.negative_prompt, first.fps) == (640, 384, 20, 0.0, "noise", 8.0)
    assert [(job.seed, job.seed_source) for job in (first, *rest)] == [(70, "option"), (71, "option"), (9, "row"), (10, "row"), (11, "row")]
    assert (rest[1].width, rest[1].steps, rest[1].guidance, rest[1].negative_prompt) == (512, 5, 4.0, "bad")


def test_drawn_seeds_are_drawn_each_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,seed\na,-1\nb,random\nc,\n")
    first, again = (jobs_of(path, seed="random", num_images=2) for _ in range(2))
    assert {job.seed_source for job in first} == {"drawn"}
    assert all(left.seed != right.seed and left.key == right.key for left, right in zip(first, again, strict=True))
    assert [job.seed - first[job.index * 2].seed for job in first[1::2]] == [1, 1, 1] or any(job.seed == 0 for job in first)


def test_short_rows_leave_their_last_cells_blank(tmp_path: Path) -> None:
    made = jobs_of(write(tmp_path / "a.csv", "prompt,seed,note\na\nb,2\n"))
    assert [(job.prompt, job.extra) for job in made] == [("a", (("note", ""),)), ("b", (("note", ""),))]


def test_other_columns_are_carried_untouched_and_told_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,Note,,Note\na,  kept  ,x,second\n")
    (made,) = jobs_of(path)
    assert made.extra == (("Note", "  kept  "), ("column 3", "x"), ("Note (2)", "second"))
    (notice,) = check(str(path), options()).warnings
    assert (notice.kind, notice.count) == ("extra-columns", 3)


RULES = SizeRules(width_multiple=16, height_multiple=16, frames_step=4, frames_offset=1, is_video=True, source="VAE scale 8 x patch 2")


@pytest.mark.parametrize(
    ("value", "step", "offset", "near"),
    [(853, 16, 0, (848, 864)), (1080, 16, 0, (1088, 1072)), (1, 16, 0, (16,)), (16, 4, 1, (17, 13)), (2, 4, 1, (1, 5)), (15, 16, 0, (16,)), (80, 8, 1, (81, 73))],
)
def test_the_nearest_legal_values_of_two_equally_near_the_larger(value: int, step: int, offset: int, near: tuple[int, ...]) -> None:
    assert neighbours(value, step, offset) == near


def test_frames_follow_the_models_rule(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,frames\na,16\nb,17\n")
    (fault,) = faults_of(path, rules=RULES)
    assert (fault.row, fault.column) == (2, "frames")
    assert "4n+1 (VAE scale 8 x patch 2)" in fault.message
    assert [job.num_frames for job in jobs_of(path, rules=RULES, snap=True)] == [17, 17]


def test_a_default_size_the_model_cannot_make_is_the_options_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,width\na,\nb,640\n")
    with pytest.raises(UsageError) as caught:
        check(str(path), options(rules=RULES, width=500))
    assert (caught.value.option, "496" in str(caught.value)) == ("--width", True)
    with pytest.raises(UsageError) as caught:
        check(str(path), options(rules=RULES, width=500, height=500, one_size=True))
    assert caught.value.option == "--size"
    assert "--size 500x500: width and height are not multiples of 16" in caught.value.message
    assert caught.value.hint == "Take 496x496 or 512x512; --snap takes 496x496."
    made = jobs_of(path, rules=RULES, width=500, snap=True)
    assert [(job.width, job.snapped) for job in made] == [(496, (("width", 500),)), (640, ())]


def test_a_picture_model_drops_frames_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,num_frames,fps\na,16,8\nb,,\n")
    rules = SizeRules(width_multiple=8, height_multiple=8)
    assert [(job.num_frames, job.fps) for job in jobs_of(path, rules=rules)] == [(None, None), (None, None)]
    assert warned(path, rules=rules) == {"frames-ignored": (2,)}


def test_a_negative_prompt_that_does_nothing_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,negative\na,bad\nb,\n")
    assert warned(path, takes_negative_prompt=False) == {"negative-ignored": (2,)}
    assert warned(path, takes_negative_prompt=True) == {}
    assert "default-negative-ignored" in warned(path, takes_negative_prompt=False, negative_prompt="x")


def test_picture_columns_are_checked_for_the_file_and_for_support(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Image.new("L", (1, 1)).save(tmp_path / "in" / "näme.png")
    write(tmp_path / "in" / "note.png", b"x")
    path = write(tmp_path / "a.csv", "prompt,image,mask\na,in/näme.png,\nb,in/none.png,\nc,,in\nd,in/note.png,\n")
    found = [(3, "image", "no-file"), (4, "mask", "no-file"), (5, "image", "no-picture")]
    assert places(faults_of(path, inputs_supported=frozenset({"image", "mask"}))) == found
    assert places(faults_of(path, limit=1)) == [(2, "image", "not-yet")]
    (made,) = jobs_of(path, limit=1, inputs_supported=frozenset({"image"}))
    assert made.image == str(tmp_path / "in" / "näme.png")
    assert made.shape.inputs == ("image",)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp", "tiff", "tiff_lzw"])
def test_a_picture_that_is_cut_short_is_a_fault_and_one_with_more_at_its_end_is_not(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole", format=kind.partition("_")[0], **({"compression": kind} if "_" in kind else {}))
    data = (tmp_path / "whole").read_bytes()
    write(tmp_path / "half", data[: len(data) // 2])
    write(tmp_path / "nearly", data[:-40])
    write(tmp_path / "more", data + b"a word of a camera's maker")
    path = write(tmp_path / "a.csv", "prompt,image\na,whole\nb,half\nc,nearly\nd,more\n")
    assert places(faults_of(path, inputs_supported=frozenset({"image"}))) == [(3, "image", "no-picture"), (4, "image", "no-picture")]


def test_several_pictures_of_a_row_are_all_checked_where_the_model_takes_them(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("L", (1, 1)).save(tmp_path / name)
    path = write(tmp_path / "a.csv", "prompt,image\nx,a.png | b.png\ny,a.png|none.png\n")
    several = frozenset({"image", "several images"})
    (fault,) = faults_of(path, inputs_supported=several)
    assert (fault.row, fault.value) == (3, "none.png")
    (made,) = jobs_of(path, limit=1, inputs_supported=several)
    assert made.image == f"{tmp_path / 'a.png'} | {tmp_path / 'b.png'}"
    assert places(faults_of(path, limit=1, inputs_supported=frozenset({"image"}))) == [(2, "image", "no-file")]


def test_a_picture_with_a_bar_in_its_name_is_one_picture(tmp_path: Path) -> None:
    for name in ("a | b.png", "c.png"):
        Image.new("L", (1, 1)).save(tmp_path / name)
    path = write(tmp_path / "a.csv", "prompt,image\nx,a | b.png\ny,c.png|c.png\n")
    one, two = jobs_of(path, inputs_supported=frozenset({"image", "several images"}))
    assert one.image == str(tmp_path / "a | b.png")
    assert two.image == f"{tmp_path / 'c.png'} | {tmp_path / 'c.png'}"


def test_loras_are_those_given_to_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,lora\na,style\nb,style:0.5\nc,other:1\nd,\n")
    supported = {"loras": (LoraFile("style", "/style.safetensors"),), "inputs_supported": frozenset({"lora"})}
    assert places(faults_of(path, **supported)) == [(4, "lora", "no-lora")]
    assert [job.lora for job in jobs_of(path, skip_invalid=True, **supported)] == ["style", "style:0.5", None]
    assert {fault.kind for fault in faults_of(path, loras=(LoraFile("style", "/a"), LoraFile("other", "/b")))} == {"not-yet"}


class TestIdentity:
    BASE = "prompt,seed,steps,guidance,note\na cat,,30,7.5,first\na dog,4,,,second\na cat,,30,7.5,third\n"

    def keys(self, folder: Path, text: str, **given: object) -> list[str]:
        return [job.key for job in jobs_of(write(folder / "a.csv", text), **given)]

    def test_what_does_not_alter_pixels_does_not_alter_it(self, tmp_path: Path) -> None:
        base = self.keys(tmp_path, self.BASE)
        assert self.keys(tmp_path, self.BASE.replace("first", "remark")) == base
        assert self.keys(tmp_path, self.BASE.replace("30,7.5", "30.0,07.50")) == base
        assert self.keys(tmp_path, self.BASE.replace("steps,guidance", "num_inference_steps,cfg")) == base
        assert self.keys(tmp_path, self.BASE, name_template="{id}") == base
        assert self.keys(tmp_path, "prompt,seed,steps,guidance\n\na dog,4,,\na cat,,30,7.5\n") == [base[1], base[0]]

    def test_what_alters_pixels_alters_it(self, tmp_path: Path) -> None:
        base = self.keys(tmp_path, self.BASE)
        for text, given in [
            (self.BASE, {"model_revision": "other"}), (self.BASE, {"pixel_settings": (("dtype", "bfloat16"),)}), (self.BASE, {"width": 512}),
            (self.BASE, {"negative_prompt": "bad"}), (self.BASE.replace("a cat", "a bat").replace("a dog", "a hog"), {}),
            (self.BASE.replace("7.5", "8").replace("4,,", "5,,"), {}),
        ]:
            assert not set(self.keys(tmp_path, text, **given)) & set(base)

    def test_more_pictures_of_a_row_keep_the_first_ones(self, tmp_path: Path) -> None:
        two = self.keys(tmp_path, "prompt,n\na cat,2\n")
        assert self.keys(tmp_path, "prompt,n\na cat,4\n")[:2] == two
        assert self.keys(tmp_path, "prompt\na cat\n", num_images=2) == two

    def test_a_default_that_a_row_does_not_use_is_no_part_of_it(self, tmp_path: Path) -> None:
        text = "prompt,steps\na cat,30\n"
        assert self.keys(tmp_path, text, steps=10) == self.keys(tmp_path, text)

    def test_steps_keep_the_seed_of_the_row_without_one(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.txt", "a cat\n")
        assert jobs_of(path, steps=4)[0].seed == jobs_of(path, steps=8)[0].seed


def test_jobs_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt\n" + "a\n" * 20_000 + '"never closed\n')
    first = next(iter(jobs(str(path), options())))
    assert first.prompt == "a"


def test_every_known_name_is_known_once() -> None:
    names = [name for column in COLUMNS for name in (column.name, *column.aliases)]
    assert len(names) == len(set(names))


def test_a_repeated_id_is_told_with_the_row_of_its_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,prompt\nx,1\ny,2\n\n x ,3\nX,4\ny,5\nx,6\n" + f"{'l' * 90},7\n{'l' * 90},8\n")
    found = [(fault.row, fault.message) for fault in faults_of(path)]
    assert found == [
        (5, "this id stands in row 2 already"), (7, "this id stands in row 3 already"), (8, "this id stands in row 2 already"),
        (10, "this id stands in row 9 already"),
    ]
    path = write(tmp_path / "a.jsonl", '{"prompt": "1", "id": 7}\n{"prompt": "2", "id": "7"}\n')
    assert [(fault.row, fault.message) for fault in faults_of(path)] == [(2, "this id stands in row 1 already")]


def test_blank_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,width\na,64\n,\n\nb,64\n , \n")
    assert "blank rows were skipped: 3" in [str(notice) for notice in check(str(path), options()).warnings]


OUTSIDE = [
    ("an exponent says how to write it", "csv", "1e38", "number", "is written with an exponent"),
    ("more than float32 holds", "csv", "4" + 38 * "0", "range", "is larger than any number a model computes with"),
    ("the same from JSON", "jsonl", "4e38", "range", "is larger than any number a model computes with"),
    ("what float32 holds, if no model means it", "csv", "3" + 38 * "0", None, ""),
    ("the same from JSON, where exponents are plain", "jsonl", "3e38", None, ""),
]


@pytest.mark.parametrize(("kind", "value", "fault", "message"), [row[1:] for row in OUTSIDE], ids=[row[0] for row in OUTSIDE])
def test_a_guidance_that_no_model_can_compute_with(tmp_path: Path, kind: str, value: str, fault: str | None, message: str) -> None:
    text = f"prompt,guidance\na,{value}\n" if kind == "csv" else f'{{"prompt": "a", "guidance": {value}}}\n'
    path = write(tmp_path / f"a.{kind}", text)
    found = faults_of(path) if fault else []
    assert [item.kind for item in found] == ([fault] if fault else [])
    assert all(message in item.message for item in found)
    if fault is None:
        assert check(str(path), options()).fault_total == 0
