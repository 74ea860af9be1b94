"""Names, groups and lists: the table of residency rules, row by row."""

from __future__ import annotations

import pytest

from batchgen.errors import UsageError
from batchgen.plan import selectors

MODEL = ("text_encoder", "transformer", "transformer_2", "vae", "audio_vae", "Brand-New", "condition_image_encoder", "connectors")
MODES = ("resident", "component-offload", "layerwise-offload")

GROUP_ROWS = [
    ("transformer", "dit"), ("transformer_2", "dit"), ("unet", "dit"), ("prior", "dit"), ("video_dit_2", "dit"), ("audio_dit", "dit"),
    ("unconditional_transformer", "dit"), ("text_encoder", "text_encoder"), ("text_encoder_3", "text_encoder"),
    ("text_encoder_xl", "text_encoder"), ("qwen_text_encoder", "text_encoder"), ("clip_text_encoder_2", "text_encoder"),
    ("image_encoder", "image_encoder"), ("condition_image_encoder", "vae"), ("vae", "vae"), ("video_vae", "vae"), ("audio_vae", "vae"),
    ("vqvae", "vae"), ("movq", "vae"), ("vocoder", "vae"), ("spatial_upsampler", "vae"), ("latent_upscaler", "vae"),
    ("sound_tokenizer", "vae"), ("connectors", None), ("dual_tower_bridge", None), ("vision_language_encoder", None),
    ("brand_new_part", None), ("transformer_x", None), ("my_vae", None), ("transformer_2_3", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "group"), GROUP_ROWS)
def test_group_of(name: str, group: str | None) -> None:
    assert selectors.group_of(name) == group


@pytest.mark.parametrize(
    ("group", "name", "cpu", "layerwise"),
    [
        ("dit", "transformer_2", True, True),
        ("dit", "connectors", True, False),
        ("dit", "vision_language_encoder_2", True, False),
        ("image_encoder", "condition_image_encoder", True, False),
        ("vae", "condition_image_encoder", True, True),
        ("vae", "vae", True, True),
        ("vae", "video_vae", True, True),
        ("vae", "audio_vae", True, False),
        ("vae", "sound_tokenizer", True, False),
        ("text_encoder", "text_encoder_2", True, True),
        ("text_encoder", "transformer", False, False),
    ],
)
def test_what_the_selectors_take(group: str, name: str, cpu: bool, layerwise: bool) -> None:
    assert selectors.cpu_takes(group, name) is cpu
    assert selectors.layerwise_takes(group, name) is layerwise


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (None, ()), ("", ()), (" , ,", ()), ("vae", ("vae",)), (" VAE ,vae", ("vae",)), ("audio-vae,transformer", ("audio_vae", "transformer")),
        ("b,a,b", ("b", "a")),
    ],
)  # fmt: skip
def test_items_are_normal_and_in_order(text: str | None, items: tuple[str, ...]) -> None:
    assert selectors.items(text) == items


def test_a_component_that_no_group_knows_is_named_exactly_and_by_all() -> None:
    exact = selectors.cpu_selection("brand_new", MODEL)
    assert selectors.cpu_match(exact, "Brand-New") == "brand_new"
    assert selectors.cpu_match(exact, "vae") is None
    assert selectors.cpu_match(selectors.cpu_selection("all", MODEL), "Brand-New") == "all"
    assert selectors.layerwise_match(selectors.layerwise_selection("all", MODEL), "Brand-New") == "all"
    assert selectors.layerwise_match(selectors.layerwise_selection("default", MODEL), "Brand-New") is None


def test_a_list_of_blanks_is_not_given() -> None:
    assert not selectors.cpu_selection(" , ", MODEL).given


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("all=resident,dit=layerwise-offload,transformer_2=component-offload", "transformer_2", "transformer_2"),
        ("all=resident,dit=layerwise-offload,transformer_2=component-offload", "transformer", "dit"),
        ("all=resident,dit=layerwise-offload", "vae", "all"),
        ("dit=resident", "connectors", None),
        ("image_encoder=resident", "condition_image_encoder", None),
    ],
    ids=["exact beats group", "group beats all", "all takes the rest", "strict members only: no helper", "strict members only: one row"],
)
def test_residency_match(text: str, name: str, key: str | None) -> None:
    assert selectors.residency_match(selectors.residency_items(text, MODEL, MODES), name) == key


def test_a_repeated_name_takes_the_last_mode_and_modes_may_be_spelled_like_names() -> None:
    assert selectors.residency_items("VAE=resident, vae = Component_Offload", MODEL, MODES) == {"vae": "component-offload"}


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        ("cpu", "tranformer", ["--cpu-offload-components", "'tranformer'", "'transformer'", "text_encoder, transformer"]),
        ("cpu", "none,vae", ["--cpu-offload-components", "'none'", "vae"]),
        ("cpu", "default", ["--cpu-offload-components", "'default'"]),
        ("layerwise", "vea", ["--layerwise-offload-components", "'vae'"]),
        ("layerwise", "none,dit", ["--layerwise-offload-components", "'none'"]),
        ("residency", "transformer", ["--component-residency", "NAME=MODE"]),
        ("residency", "=resident", ["--component-residency", "NAME=MODE"]),
        ("residency", "vae=", ["--component-residency", "NAME=MODE"]),
        ("residency", "vae=residentt", ["--component-residency", "'resident'", "vae"]),
        ("residency", "transformer=fsdp", ["--component-residency", "--fsdp"]),
        ("residency", "vaee=resident", ["--component-residency", "'vae'"]),
        ("residency", "none=resident", ["--component-residency", "'none'"]),
    ],
)
def test_a_wrong_item_names_the_option_the_item_and_the_nearest_right_one(parse: str, text: str, words: list[str]) -> None:
    parsers = {
        "cpu": lambda: selectors.cpu_selection(text, MODEL),
        "layerwise": lambda: selectors.layerwise_selection(text, MODEL),
        "residency": lambda: selectors.residency_items(text, MODEL, MODES),
    }
    with pytest.raises(UsageError) as caught:
        parsers[parse]()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.option is not None
