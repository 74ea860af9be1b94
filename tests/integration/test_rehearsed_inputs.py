"""What jobs bring besides prompts, as it is rehearsed: pictures on every road, models that do nothing without one, long prompts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.execute import rehearse
from batchgen.execute.load import ModelFolder
from batchgen.jobs import ShapeKey
from batchgen.plan.records import Rehearsed

TinyFolder = Callable[[str], Path]


def shape(*inputs: str, side: int = 64, strength: float | None = None) -> ShapeKey:
    return ShapeKey(side, side, None, None, 3, 4.0, None, strength, None, inputs)


def played(folder: Path, *shapes: ShapeKey, batches: tuple[int, ...] = (1, 2), **more: object) -> Rehearsed:
    dtypes = dict.fromkeys(ModelFolder.read(folder).models, "float32")
    return rehearse.rehearse(str(folder), dtypes, list(shapes), list(batches), **more)  # type: ignore[arg-type]


def test_a_mask_takes_the_whole_pipeline_one_row_at_a_time(tiny_folder: TinyFolder) -> None:
    """Pictures under a mask are the ordinary call's business; it encodes them before it denoises."""
    masked = shape("image", "mask", strength=0.7)
    found = played(tiny_folder("sdxl"), masked)
    assert [(profile.stage, profile.batch) for profile in found.profiles] == [("pipeline", 1)]
    assert found.profiles[0].order[0].startswith("text_encoder")
    assert found.profiles[0].order.count("vae") == 2, "encoded before the denoiser, decoded after it"


def test_jobs_with_and_without_pictures_take_their_own_roads(tiny_folder: TinyFolder) -> None:
    plain, pictured = shape(), shape("image", strength=0.6)
    found = played(tiny_folder("qwen_image"), plain, pictured, batches=(1,))
    assert [(profile.shape, profile.stage) for profile in found.profiles] == [
        (plain.text, "text_encoder"), (plain.text, "denoise"), (plain.text, "decode"), (pictured.text, "pipeline"),
    ]  # fmt: skip


def test_a_model_that_edits_pictures_is_rehearsed_with_one(tiny_folder: TinyFolder) -> None:
    found = played(tiny_folder("wan21_i2v"), ShapeKey(64, 64, 9, None, 2, 4.0, None, None, None, ()), batches=(1,))
    assert {profile.shape for profile in found.profiles} == {"64x64x9, 2 steps, guidance 4"}
    assert any("blank picture" in note for note in found.notes)


@pytest.mark.parametrize(
    ("steps", "other_steps", "brought"),
    [
        ((1,), (), {"transformer"}), ((3,), (), {"transformer", "transformer_2"}), ((1, 3), (), {"transformer", "transformer_2"}),
        ((1,), (3,), {"transformer", "transformer_2"}), ((1,), (None,), {"transformer", "transformer_2"}), ((None,), (), {"transformer", "transformer_2"}),
    ],
    ids=["none reaches it", "one reaches it", "one of two does", "one that is not played does", "the model's own steps do", "and are played"],
)
def test_an_expert_that_no_step_of_the_list_reaches_is_brought_in_by_no_stage(
    tiny_folder: TinyFolder, steps: tuple[int | None, ...], other_steps: tuple[int | None, ...], brought: set[str],
) -> None:
    shapes = [ShapeKey(64, 64, 5, None, count, 4.0, None, None, None, ()) for count in steps]
    found = played(tiny_folder("wan22"), *shapes, batches=(1,), other_steps=other_steps)
    assert {part.name for part in found.components} >= {"transformer", "transformer_2"}
    for profile in found.profiles:
        if profile.stage == "denoise":
            assert set(profile.components) == brought
            assert profile.weights_bytes == sum(found.component(name).weights_bytes for name in brought)
            assert {name for name, _ in profile.calls} <= brought


def test_longer_prompts_need_more(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tmp_path / "known"
    shutil.copytree(tiny_folder("qwen_image"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.rmtree(folder / "tokenizer")
    short, long = (played(folder, shape(), batches=(1,), tokens=tokens).profiles[0] for tokens in (94, 400))
    assert short.stage == long.stage == "text_encoder"
    assert long.activation_bytes > 3 * short.activation_bytes
    assert long.output_bytes > short.output_bytes


@pytest.mark.parametrize("side", [64, 96])
def test_a_call_with_an_area_of_its_own_is_rehearsed_at_the_size_asked_for(side: int, tiny_folder: TinyFolder) -> None:
    """FLUX.1 Kontext's call brings every size to a megapixel unless it is told another area; a run tells it."""
    found = played(tiny_folder("flux_kontext"), shape("image", side=side), batches=(1,))
    (decode,) = (profile for profile in found.profiles if profile.stage == "decode")
    assert decode.output_bytes == side * side * 3 * 4, "a float picture of that size"


@pytest.mark.parametrize("family", ["lumina2"])
def test_the_ordinary_road_calls_its_components_in_order(family: str, tiny_folder: TinyFolder) -> None:
    (profile,) = played(tiny_folder(family), shape(), batches=(1,)).profiles
    assert profile.order == ("text_encoder", "transformer", "vae")
