"""Models known by their configs: each folder is whole, and a plan's facts come from it without files or network."""

from __future__ import annotations

import pytest

from batchgen.inventory.known import Known, known_facts, known_models
from batchgen.inventory.options import ModelOptions
from batchgen.inventory.profiles import find_profile
from batchgen.inventory.rules import size_rules
from batchgen.inventory.safetensors import BITS

MODELS = tuple(known_models().values())


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.model)
def test_every_known_model_is_whole(known: Known) -> None:
    facts = known_facts(known.model, ModelOptions(), platform="cuda")
    assert facts is not None
    assert {part.name for part in facts.components} == set(known.stored) == set(known.parameters)
    assert all(part.bytes_as_loaded for part in facts.components)
    assert all((known.folder / part.name / "config.json").is_file() for part in facts.components)
    assert find_profile(facts).task == ("video" if size_rules(facts).is_video else "image")
    assert size_rules(facts).width_multiple is not None


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.model)
def test_every_fact_of_a_known_model_names_what_confirms_it(known: Known) -> None:
    folders = {path.parent.name for path in known.folder.glob("*/*.json")}
    assert set(known.sources) == folders | {"index", "stored"}
    assert all(addresses and all(address.startswith("https://") for address in addresses) for addresses in known.sources.values())


HEADER_BYTES = 2**20  # of all files of a component: a name, shape and place for each of its tensors


@pytest.mark.parametrize("known", [known for known in MODELS if known.published], ids=lambda known: known.model)
def test_published_weight_files_are_as_large_as_the_facts_make_them(known: Known) -> None:
    """Sizes that were read off the published files hold the counts and the stored dtypes, which come from the configs."""
    facts = known_facts(known.model, ModelOptions(), platform="cuda")
    assert facts is not None
    sizes = {part.name: sum(count * BITS[dtype] // 8 for dtype, count in part.stored_dtypes) for part in facts.components}
    assert {name: size - sizes[name] for name, size in known.published.items() if not 0 <= size - sizes[name] < HEADER_BYTES} == {}


# (multiple of width and height, frames step): as the models' own pipelines check them
RULES = {
    "Qwen/Qwen-Image": (16, None), "black-forest-labs/FLUX.1-dev": (16, None), "stabilityai/stable-diffusion-xl-base-1.0": (8, None),
    "stabilityai/stable-diffusion-3.5-large": (16, None), "Wan-AI/Wan2.1-T2V-14B-Diffusers": (16, 4), "Lightricks/LTX-Video": (32, 8),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": (16, 4), "Tongyi-MAI/Z-Image-Turbo": (16, None),
    "black-forest-labs/FLUX.2-klein-4B": (16, None), "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (32, 4), "Lightricks/LTX-2": (32, 8),
}  # fmt: skip


@pytest.mark.parametrize(("model", "expected"), RULES.items(), ids=RULES.keys())
def test_size_rules_of_full_size_models(model: str, expected: tuple[int, int | None]) -> None:
    facts = known_facts(model, ModelOptions(), platform="cuda")
    assert facts is not None
    rules = size_rules(facts)
    assert (rules.width_multiple, rules.frames_step) == expected


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.model)
def test_a_model_can_make_its_default_size(known: Known) -> None:
    facts = known_facts(known.model, ModelOptions(), platform="cuda")
    assert facts is not None
    rules, defaults = size_rules(facts), dict(find_profile(facts).defaults)
    sides = [defaults.get("width", 0), defaults.get("height", 0)]  # none: the input picture's
    assert [side % (rules.width_multiple or 1) for side in sides] == [0, 0]
    assert (defaults.get("num_frames", 1) - 1) % (rules.frames_step or 1) == 0


def test_dtypes_follow_the_platform_and_the_user() -> None:
    def dtypes(platform: str, **options: str) -> dict[str, str | None]:
        facts = known_facts("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", ModelOptions(**options), platform=platform)  # type: ignore[arg-type]
        assert facts is not None
        return {part.name: part.dtype for part in facts.components}

    assert dtypes("cuda") == {"text_encoder": "bfloat16", "transformer": "bfloat16", "vae": "float32"}
    assert set(dtypes("cpu").values()) == {"float32"}
    assert set(dtypes("cuda", dtype="fp16").values()) == {"float16"}


def test_names_are_found_in_any_case_and_others_not() -> None:
    assert known_facts("qwen/qwen-image", ModelOptions(), platform="cuda") is not None
    assert known_facts("Qwen/Qwen-Image-Never", ModelOptions(), platform="cuda") is None
