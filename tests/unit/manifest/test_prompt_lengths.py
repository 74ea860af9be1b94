"""Prompts against the model's own tokenizers: what every encoder cuts is lost, what one reads is not. No torch is loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from manifestkit import CASES, faults_of, jobs_of, options, write
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from batchgen.inventory.prompt_limits import TextEncoderLimit, picture_inputs, pipeline_cut, prompt_limits, takes_negative_prompt
from batchgen.inventory.records import ModelFacts
from batchgen.manifest import check
from batchgen.manifest.lengths import LengthCheck


def words(folder: Path, name: str, max_tokens: int) -> TextEncoderLimit:
    """A tokenizer whose tokens are words, with one special token at each end, as CLIP has."""
    tokenizer = Tokenizer(models.WordLevel({"[unk]": 0, "[begin]": 1, "[end]": 2}, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[begin] $A [end]", special_tokens=[("[begin]", 1), ("[end]", 2)])
    tokenizer.enable_truncation(5)  # a file may ask for it; all tokens are counted nevertheless
    (folder / name).mkdir(parents=True)
    tokenizer.save(str(folder / name / "tokenizer.json"))
    write(folder / name / "tokenizer_config.json", json.dumps({"model_max_length": max_tokens}))
    return TextEncoderLimit(name, str(folder / name), max_tokens)


def test_b16_the_lost_tail_is_told_with_its_row(tmp_path: Path) -> None:
    path = CASES / "b16_longprompt.csv"
    prompt = next(job.prompt for job in jobs_of(path) if job.id == "long")
    summary = check(str(path), options(tokenizers=(words(tmp_path, "tokenizer", 77),)))
    (notice,) = (notice for notice in summary.warnings if notice.kind == "truncated")
    assert notice.rows == (2,)
    total = len(prompt.replace(",", " , ").split())
    tail = prompt.replace(",", " , ").split()[75]
    assert notice.examples[0].startswith(f"tokenizer reads 75 of {total} tokens; lost: '{tail}")


def test_b16_what_another_encoder_reads_whole_is_no_loss(tmp_path: Path) -> None:
    both = words(tmp_path, "tokenizer", 77), words(tmp_path, "tokenizer_2", 512)
    summary = check(str(CASES / "b16_longprompt.csv"), options(tokenizers=both, on_truncate="error"))
    assert [notice.kind for notice in summary.warnings] == ["partly-read"]


def test_b16_on_truncate_error_refuses_the_row(tmp_path: Path) -> None:
    limits = (words(tmp_path, "tokenizer", 77), words(tmp_path, "tokenizer_2", 100))
    (fault,) = faults_of(CASES / "b16_longprompt.csv", tokenizers=limits, on_truncate="error")
    assert (fault.row, fault.column, fault.kind) == (2, "prompt", "truncated")
    assert "tokenizer reads 75" in fault.message
    assert "tokenizer_2 reads 98" in fault.message
    assert [job.id for job in jobs_of(CASES / "b16_longprompt.csv", tokenizers=limits, on_truncate="error", skip_invalid=True)] == ["short", "sep74"]


def test_the_tail_begins_where_the_encoder_that_reads_most_stops(tmp_path: Path) -> None:
    lost = LengthCheck([words(tmp_path, "a", 5), words(tmp_path, "b", 6)]).lost("one two three four five six")
    assert lost is not None
    assert (lost.tail, lost.by_all) == ("five six", True)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_prompt_that_just_fits_is_read(tmp_path: Path, count: int) -> None:
    check = LengthCheck([words(tmp_path, "a", 5)])
    assert check.lost(" ".join(["word"] * count)) is None
    assert check.lost(" ".join(["word"] * 4)) is not None


@pytest.mark.parametrize("family", ["clip", "qwen"])
def test_files_of_older_models_count_as_transformers_does(tmp_path: Path, family: str) -> None:
    import tiny

    tokenizer = tiny.clip_tokenizer() if family == "clip" else tiny.qwen_tokenizer()
    tokenizer.save_pretrained(tmp_path / "new")
    content = json.loads((tmp_path / "new" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    write(tmp_path / "old" / "vocab.json", json.dumps(content["vocab"]))
    write(tmp_path / "old" / "merges.txt", "#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in content["merges"]))
    write(tmp_path / "old" / "tokenizer_config.json", json.dumps({"tokenizer_class": type(tokenizer).__name__}))
    for text in ["a red circle, on a BLUE  background's edge 2024", "naïve 猫 🐈‍⬛\nnew line", "a small green square " * 9]:
        ids = tokenizer(text)["input_ids"]
        special = len(ids) - len(tokenizer(text, add_special_tokens=False)["input_ids"])
        for folder in ("new", "old"):
            lost = LengthCheck([TextEncoderLimit("t", str(tmp_path / folder), special + 3)]).lost(text)
            assert lost is not None
            assert lost.text == f"t reads 3 of {len(ids) - special} tokens"


def test_a_sentencepiece_model_is_counted(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = write(tmp_path / "corpus.txt", "a red circle on a blue background\na small green square\n" * 20)
    (tmp_path / "t5").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "t5" / "spiece"), vocab_size=24, model_type="unigram", minloglevel=2,
    )
    lost = LengthCheck([TextEncoderLimit("t5", str(tmp_path / "t5"), 4)]).lost("a red circle on a blue background")
    assert lost is not None
    assert "t5 reads 3 of" in lost.text
    assert "a red circle on a blue background".endswith(lost.tail)


def test_a_tokenizer_of_no_known_kind_is_told_and_never_taken_for_a_short_one(tmp_path: Path) -> None:
    write(tmp_path / "odd" / "tokenizer.json", "{}")
    limits = (words(tmp_path, "tokenizer", 20), TextEncoderLimit("odd", str(tmp_path / "odd"), 77))
    kinds = {notice.kind for notice in check(str(CASES / "b16_longprompt.csv"), options(tokenizers=limits)).warnings}
    assert kinds == {"not-counted", "partly-read"}


def test_limits_come_from_the_tokenizers_and_the_pipelines_own_call(tmp_path: Path) -> None:
    words(tmp_path, "tokenizer", 77)
    words(tmp_path, "tokenizer_2", 10**30)
    facts = ModelFacts("m", "folder", str(tmp_path), "r", "FluxPipeline", (), other=("scheduler", "tokenizer", "tokenizer_2"))
    assert [(limit.name, limit.max_tokens) for limit in prompt_limits(facts)] == [("tokenizer", 77), ("tokenizer_2", 512)]


@pytest.mark.parametrize(
    ("class_name", "tokens"),
    [("FluxPipeline", 512), ("StableDiffusion3Pipeline", 256), ("WanPipeline", 512), ("LTXPipeline", 128), ("StableDiffusionPipeline", None), ("Nope", None), ("a b", None)],
)
def test_the_length_a_pipeline_cuts_to_is_read_from_its_source(class_name: str, tokens: int | None) -> None:
    assert pipeline_cut(class_name) == tokens


@pytest.mark.parametrize(
    ("class_name", "takes"), [("FluxPipeline", True), ("QwenImagePipeline", True), ("Flux2Pipeline", False), ("Nope", None)]
)
def test_whether_a_pipeline_takes_a_negative_prompt_is_read_from_its_source(class_name: str, takes: bool | None) -> None:
    assert takes_negative_prompt(ModelFacts("m", "folder", None, "r", class_name, ())) is takes


@pytest.mark.parametrize(
    ("class_name", "takes"),
    # FLUX.1 and Z-Image by sister pipelines of the same components; text-to-video Wan has none: its sister needs an image encoder
    [("FluxPipeline", {"image", "mask", "strength"}), ("ZImagePipeline", {"image", "mask", "strength"}), ("LTXPipeline", {"image"}),
     ("WanPipeline", set()), ("HunyuanVideo15Pipeline", set()), ("PixArtSigmaPipeline", set()),
     ("QwenImageEditPipeline", {"image", "mask", "strength"}), ("FluxInpaintPipeline", {"image", "mask", "strength"}),
     ("WanImageToVideoPipeline", {"image", "last_image"}), ("Nope", {"image", "last_image", "mask", "strength", "several images"}),
     ("Flux2Pipeline", {"image", "several images"}), ("QwenImageEditPlusPipeline", {"image", "several images"})],
)
def test_which_pictures_a_pipeline_takes_is_read_from_its_source(class_name: str, takes: set[str]) -> None:
    assert picture_inputs(ModelFacts("m", "folder", None, "r", class_name, ())) == takes


def test_counting_loads_no_torch(tmp_path: Path) -> None:
    words(tmp_path, "tokenizer", 20)
    code = (
        "import sys; from batchgen.manifest import *; from batchgen.inventory.prompt_limits import TextEncoderLimit; "
        "check(sys.argv[1], ManifestOptions(tokenizers=(TextEncoderLimit('t', sys.argv[2], 20),))); "
        "print([name for name in ('torch', 'transformers', 'diffusers', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(CASES / "b16_longprompt.csv"), str(tmp_path / "tokenizer")], capture_output=True, text=True, check=True,
    )
    assert done.stdout.strip() == "[]"
