"""What a job's guidance means for a model, from its call signature and its stages' guiders alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.guiders import ClassifierFreeGuidance

from batchgen.execute.guidance import GuidanceRules, RowGuidance, is_guider_name
from enginekit import make_job


def rules(call: dict[str, Any], *, guiders: tuple[str, ...] = ("guider",), embeds: bool = False, **extra: Any) -> GuidanceRules:
    return GuidanceRules(call, {name: ClassifierFreeGuidance() for name in guiders}, embeds, extra)


@pytest.mark.parametrize(
    ("made", "fields", "on", "scale", "told"),
    [
        (rules({"guidance_scale": 5.0}), {}, True, None, 5.0),
        (rules({"guidance_scale": 5.0}), {"guidance": 3.0}, True, 3.0, 3.0),
        (rules({"guidance_scale": 5.0}), {"guidance": 1.0}, False, 1.0, 1.0),
        (rules({"guidance_scale": 5.0}), {"guidance": 0.0}, False, 1.0, 1.0),
        # a call that asks for true_cfg_scale runs a second branch only where a negative prompt is given
        (rules({"true_cfg_scale": 4.0, "guidance_scale": None}), {}, False, 1.0, 1.0),
        (rules({"true_cfg_scale": 4.0, "guidance_scale": None}), {"negative_prompt": "x"}, True, None, 4.0),
        (rules({"true_cfg_scale": 4.0}), {"negative_prompt": "", "guidance": 2.0}, True, 2.0, 2.0),
        (rules({"true_cfg_scale": 4.0}), {"negative_prompt": "x", "guidance": 2.0, "true_cfg_scale": 6.0}, True, 6.0, 6.0),
        # a formula that counts from 0
        (rules({"guidance_scale": 5.0}, use_original_formulation=True), {"guidance": 1.0}, True, 1.0, 1.0),
        (rules({"guidance_scale": 5.0}, use_original_formulation=True), {"guidance": 0.0}, False, 0.0, 0.0),
        # distilled: the scale is embedded
        (rules({"guidance_scale": 3.5}, guiders=(), embeds=True), {}, False, 3.5, 3.5),
        (rules({"guidance_scale": 3.5}, guiders=(), embeds=True), {"guidance": 2.0}, False, 2.0, 2.0),
    ],
)
def test_a_jobs_guidance(made: GuidanceRules, fields: dict[str, Any], on: bool, scale: float | None, told: float) -> None:
    found = made.of(make_job(0, "x", **fields))
    assert (found.on, found.scale, found.told) == (on, scale, told)


def test_a_guider_takes_the_calls_defaults_by_name() -> None:
    call = {"guidance_scale": 3.0, "guidance_rescale": 0.7, "audio_guidance_scale": 7.0, "guidance_scale_2": None}
    made = rules(call, guiders=("guider", "audio_guider", "guider_2"))
    assert {name: guider.config["guidance_scale"] for name, guider in made.guiders.items()} == {
        "guider": 3.0, "audio_guider": 7.0, "guider_2": 3.0,
    }
    assert made.guiders["guider"].config["guidance_rescale"] == 0.7
    # the sound's own scale does not follow the job's, so its second branch stays on
    quiet = made.of(make_job(0, "x", guidance=1.0))
    assert quiet.on
    batch = made.guiders_for([quiet])
    assert {name: guider.guidance_scale for name, guider in batch.items()} == {"guider": 1.0, "audio_guider": 7.0, "guider_2": 1.0}


def test_rows_of_different_scales_get_a_guider_with_one_each() -> None:
    made = rules({"guidance_scale": 5.0})
    rows = [made.of(make_job(0, "x", guidance=3.0)), made.of(make_job(1, "x"))]
    guider = made.guiders_for(rows)["guider"]
    assert isinstance(guider, RowGuidance)
    assert guider.scales.tolist() == [3.0, 5.0]
    assert type(made.guiders_for(rows[:1])["guider"]) is ClassifierFreeGuidance


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pitfall_12_every_row_has_what_the_stock_guider_gives_it(original: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cond, uncond = (torch.randn(3, 4, 8, 8).to(dtype) for _ in range(2))
    scales = [3.3, 5.1, 7.7]
    mixed = RowGuidance(scales, original).forward(cond, uncond).pred
    assert mixed.dtype == dtype
    for index, scale in enumerate(scales):
        stock = ClassifierFreeGuidance(guidance_scale=scale, use_original_formulation=original)
        assert torch.equal(mixed[index], stock.forward(cond[index], uncond[index]).pred)


def test_what_only_the_ordinary_call_can_do() -> None:
    job = make_job(0, "x", negative_prompt="y", true_cfg_scale=3.0)
    assert rules({"true_cfg_scale": 1.0, "guidance_scale": 3.5}, guiders=(), embeds=True).beyond_stages(job)
    assert not rules({"true_cfg_scale": 4.0}).beyond_stages(job)


@pytest.mark.parametrize(
    ("name", "is_one"), [("guider", True), ("guider_2", True), ("audio_guider", True), ("guidance", False), ("guider_input", False)]
)
def test_guiders_are_known_by_name(name: str, is_one: bool) -> None:
    assert is_guider_name(name) == is_one
