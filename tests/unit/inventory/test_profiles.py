"""Deployment profiles: the shipped ones against the published facts, how one is found, and what a file may say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import UsageError
from batchgen.inventory import profiles
from batchgen.inventory.known import known_facts
from batchgen.inventory.options import ModelOptions
from batchgen.inventory.profiles import ProfileError, all_profiles, find_profile, named_profile, read_profile
from batchgen.inventory.records import ComponentFacts, ModelFacts
from batchgen.plan import selectors

FAMILIES = json.loads((Path(__file__).parents[2] / "cases" / "deployments.json").read_text(encoding="utf-8"))
OWN = {"builtin", "generic-image", "generic-video", "flux-2", "hunyuan-video-1.5", "ltx"}
# What a field is when the published facts leave it out.
LEFT_OUT: dict[str, Any] = {
    "uses_cfg": False, "dit_layerwise_offload_modes": [], "keep_resident_min_available_gb": None, "keep_resident_components": ["vae"],
    "fsdp_auto_min_available_memory_gb": None, "fsdp_auto_requires_cfg": True, "auto_enable_cfg_parallel": True,
    "supports_cfg_parallel": True, "dit_offload_prefetch_size": None, "models": [],
}  # fmt: skip


def found(
    pipeline_class: str | None, *names: str, source: str = "/models/some-folder", kind: Any = "folder", index: dict[str, str] | None = None
) -> ModelFacts:
    parts = tuple(ComponentFacts(name, "diffusers", "Part", None, None) for name in names or ("text_encoder", "transformer", "vae"))
    return ModelFacts(
        source=source, kind=kind, folder=source if kind != "hub" else "/cache/abc", revision="", pipeline_class=pipeline_class,
        components=parts, index=tuple((index or {}).items()),
    )  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_as_published(name: str) -> None:
    profile, published = named_profile(name).profile, FAMILIES[name]
    assert profile.task == published["task"]
    assert list(profile.components) == published["components"]
    for field, default in LEFT_OUT.items():
        value = getattr(profile, field)
        assert (list(value) if isinstance(value, tuple) else value) == published.get(field, default), field


def test_every_family_and_nothing_unknown_is_shipped() -> None:
    assert len(FAMILIES) == 33
    assert set(profiles.profile_names()) == set(FAMILIES) | OWN


@pytest.mark.parametrize("name", profiles.profile_names())
def test_a_shipped_profile_is_named_like_its_file_and_says_where_its_numbers_come_from(name: str) -> None:
    profile = named_profile(name).profile
    assert profile.name == name
    assert len(profile.source) > 20
    if profile.defaults and name not in OWN:
        assert "[defaults]" in profile.source


def test_no_two_profiles_list_the_same_model() -> None:
    models = [model.lower() for entry in all_profiles().values() for model in entry.profile.models]
    assert len(models) == len(set(models))


@pytest.mark.parametrize(("model", "name"), [(model, name) for name, facts in FAMILIES.items() for model in facts.get("models", [])])
def test_a_model_id_finds_its_family_letter_case_aside(model: str, name: str) -> None:
    profile = find_profile(found("Whatever", source=model.upper(), kind="hub"))
    assert profile.name == name
    assert profile.matched.startswith("model id")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (found("QwenImagePipeline"), "qwen-image"),
        (found("QwenImageEditPlusPipeline"), "qwen-image-edit"),
        (found("ZImagePipeline"), "z-image"),
        (found("ZImagePipeline", source="/models/Z-Image-Turbo"), "z-image-turbo"),
        (found("ZImagePipeline", source="/hf/models--Tongyi-MAI--Z-Image-Turbo/snapshots/abc"), "z-image-turbo"),
        (found("ZImagePipeline", source="somebody/my-turbo-tune", kind="hub"), "z-image-turbo"),
        (found("FluxPipeline", "text_encoder", "text_encoder_2", "transformer", "vae"), "flux-1"),
        (found("WanPipeline"), "wan2.1-t2v-14b"),
        (found("WanPipeline", source="/models/Wan2.1-T2V-1.3B-Diffusers"), "wan2.1-t2v-1.3b"),
        (found("WanPipeline", "text_encoder", "transformer", "transformer_2", "vae"), "wan2.2-a14b"),
        (found("WanPipeline", index={"expand_timesteps": "true"}), "wan2.2-ti2v-5b"),
        (found("WanPipeline", index={"expand_timesteps": "false"}), "wan2.1-t2v-14b"),
        (found("WanImageToVideoPipeline", "text_encoder", "image_encoder", "transformer", "vae"), "wan2.1-i2v-14b"),
        (found("WanImageToVideoPipeline", "text_encoder", "transformer", "transformer_2", "vae"), "wan2.2-a14b"),
        (found("SanaWMPipeline"), "sana-wm"),
        (found("Cosmos3OmniPipeline"), "cosmos3-super"),
        (found("PixArtSigmaPipeline"), "generic-image"),
        (found("HunyuanVideo15Pipeline"), "hunyuan-video-1.5"),
        (found("MochiPipeline"), "generic-video"),
        (found("CogVideoXPipeline"), "generic-video"),
        (found("Kandinsky5T2VPipeline"), "generic-video"),
        (found("LTXPipeline"), "ltx"),
        (found(None), "generic-image"),
        (found("ZImagePipeline", source="builtin", kind="builtin"), "builtin"),
    ],
)
def test_a_folder_finds_its_family_by_class_then_name_and_parts(model: ModelFacts, name: str) -> None:
    assert find_profile(model).name == name


def test_without_a_model_the_default_model_s_profile_is_found() -> None:
    assert find_profile(None).name == "qwen-image"


def test_a_name_or_a_file_wins_over_what_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ntask = "video"\nsource = "me"\n', encoding="utf-8")
    assert find_profile(found("QwenImagePipeline"), name="mova").name == "mova"
    assert find_profile(found("QwenImagePipeline"), file=file).name == "mine"
    with pytest.raises(UsageError, match="--profile-file"):
        find_profile(None, name="mova", file=file)


@pytest.mark.parametrize(
    ("source", "steps", "guidance"),
    [("/models/FLUX.1-dev", 50, 3.5), ("/models/FLUX.1-schnell", 4, 0.0), ("black-forest-labs/FLUX.1-schnell", 4, 0.0)],
)
def test_defaults_follow_the_model_s_name(source: str, steps: int, guidance: float) -> None:
    defaults = dict(find_profile(found("FluxPipeline", source=source, kind="hub" if source[0] != "/" else "folder")).defaults)
    assert (defaults["steps"], defaults["guidance"], defaults["width"]) == (steps, guidance, 1024)


# (steps, guidance) that the models' own pages give, where a family's members differ
OF_MEMBERS = {
    "black-forest-labs/FLUX.1-Kontext-dev": (28, 2.5), "black-forest-labs/FLUX.1-Krea-dev": (28, 4.5),
    "black-forest-labs/FLUX.2-dev": (50, 4.0), "black-forest-labs/FLUX.2-klein-4B": (4, 1.0), "black-forest-labs/FLUX.2-klein-base-9B": (50, 4.0),
    "Qwen/Qwen-Image-Edit": (50, 4.0), "Qwen/Qwen-Image-Edit-2509": (40, 4.0), "Qwen/Qwen-Image-Edit-2511": (40, 4.0),
    "stabilityai/stable-diffusion-3.5-large": (28, 3.5), "stabilityai/stable-diffusion-3.5-large-turbo": (4, 0.0),
    "stabilityai/stable-diffusion-3.5-medium": (40, 4.5), "Tongyi-MAI/Z-Image": (50, 4.0), "Tongyi-MAI/Z-Image-Turbo": (9, 0.0),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (40, 4.0), "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (40, 3.5), "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (50, 5.0),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": (50, 6.0),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v_distilled": (50, 1.0),
}  # fmt: skip


@pytest.mark.parametrize(("model", "expected"), OF_MEMBERS.items(), ids=OF_MEMBERS.keys())
def test_members_of_a_family_have_their_own_defaults(model: str, expected: tuple[int, float]) -> None:
    facts = known_facts(model, ModelOptions(), platform="cuda")
    assert facts is not None
    defaults = dict(find_profile(facts).defaults)
    assert (defaults["steps"], defaults["guidance"]) == expected


def test_the_built_in_model_has_every_default_of_a_picture_and_stays_on_any_device() -> None:
    profile = named_profile("builtin").profile
    assert set(dict(profile.defaults)) == {"width", "height", "steps", "guidance"}
    assert profile.keep_resident_min_available_gb == 0
    assert set(profile.keep_resident_components) == {"dit", "text_encoder", "vae"}


def test_an_unknown_profile_name_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="'z-image-turbo'"):
        named_profile("z-image-turbu")


GOOD = 'name = "mine"\ntask = "image"\nsource = "me"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('task = "image"\nsource = "me"\n', ["name", "missing"]),
        (GOOD + "keep_resident_min_availble_gb = 3\n", ["'keep_resident_min_availble_gb'", "'keep_resident_min_available_gb'"]),
        (GOOD + "keep_resident_min_available_gb = -3\n", ["keep_resident_min_available_gb", "-3", "never"]),
        (GOOD + 'keep_resident_min_available_gb = "nevr"\n', ["keep_resident_min_available_gb", "never"]),
        (GOOD + "keep_resident_min_available_gb = nan\n", ["keep_resident_min_available_gb"]),
        (GOOD + 'keep_resident_components = ["vea"]\n', ["keep_resident_components", "'vae'"]),
        (GOOD + 'keep_resident_components = "vae"\n', ["keep_resident_components", "list"]),
        (GOOD + 'dit_layerwise_offload_modes = ["auto"]\n', ["dit_layerwise_offload_modes", "memory"]),
        (GOOD + 'dit_layerwise_offload_modes = ["speed", "memory"]\n', ["dit_layerwise_offload_modes", "auto, memory"]),
        (GOOD.replace("image", "picture"), ["task", "'picture'", "image, video"]),
        (GOOD + "uses_cfg = 1\n", ["uses_cfg", "true or false"]),
        (GOOD + "dit_offload_prefetch_size = 0\n", ["dit_offload_prefetch_size", "0"]),
        (GOOD + "[defaults]\nwidht = 3\n", ["defaults", "'widht'", "'width'"]),
        (GOOD + "[defaults]\nwidth = 0\n", ["defaults", "width", "0"]),
        (GOOD + "[defaults]\nsteps = 2.5\n", ["defaults", "steps", "2.5"]),
        (GOOD + "[defaults]\nfps = 0\n", ["defaults", "fps is 0.1 ... 1000", "0"]),
        (GOOD + "[match]\nnames = []\n", ["match", "name_words"]),
        (GOOD + 'name = "twice"\n', ["not TOML"]),
        ("\x00", ["not TOML"]),
    ],
)
def test_a_wrong_profile_file_is_refused_by_key_and_nearest_right_one(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        read_profile(file)
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in ["mine.toml", *words]), str(caught.value)


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(sorted(profiles.SCHEMA)), value=st.sampled_from(["1", '""', "[]", "true", "{}", "-1", '["x"]', "[1]", "inf"]))
def test_no_value_of_a_key_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, key: str, value: str) -> None:
    file = tmp_path_factory.mktemp("profile") / "p.toml"
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} ")]
    file.write_text("\n".join([*lines, f"{key} = {value}"]), encoding="utf-8")
    try:
        assert read_profile(file).profile.name
    except ProfileError as error:
        assert key in str(error)  # noqa: PT017 - some values are right, and then nothing is raised


def test_every_key_of_the_schema_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "residency.md").read_text(encoding="utf-8")
    missing = [key for key in profiles.SCHEMA if f"`{key}`" not in text and f"`[{key}]`" not in text]
    assert not missing


def test_shipped_files_have_no_key_that_says_what_holds_anyway() -> None:
    for path in (profiles.config_dir() / "models").glob("*.toml"):
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        assert not [key for key, value in LEFT_OUT.items() if key != "models" and key in raw and raw[key] == value], path.name


def test_profiles_and_selectors_mean_the_same_groups() -> None:
    assert profiles.GROUPS == selectors.GROUPS
