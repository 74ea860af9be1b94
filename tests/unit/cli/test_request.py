"""What follows from a request: the folder's name, defaults of the profile, which settings alter pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.cli.request import (
    Facts,
    RenderRequest,
    cpu_ranks,
    default_folder,
    engine_pixels,
    engine_settings,
    manifest_options,
    pixel_settings,
    with_profile,
)
from batchgen.cli.run_options import RunOptions
from batchgen.errors import UsageError
from batchgen.inventory import device
from batchgen.inventory.host import host_share
from batchgen.inventory.model import ModelOptions
from batchgen.inventory.records import ComponentFacts, DeviceFacts, ModelFacts, Profile
from batchgen.manifest.options import JobDefaults, ManifestOptions
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Overrides, PlanFacts
from batchgen.runfolder import RunFolder
from batchgen.units import GIB

MODEL = ModelFacts(
    source="Some/Model", kind="hub", folder=None, revision="c0ffee", pipeline_class="QwenImagePipeline",
    components=(
        ComponentFacts("transformer", "diffusers", "X", 10, 5, dtype="bfloat16"),
        ComponentFacts("vae", "diffusers", "Y", 10, 5, dtype="float32", variant="fp16"),
    ),
)
PROFILE = Profile("some", "image", defaults=(("width", 1328), ("steps", 50), ("guidance", 4.0)))


def request(**more: object) -> RenderRequest:
    given = RenderRequest("list.csv", "Some/Model", ModelOptions(), Overrides(), ManifestOptions(), RunOptions())
    return replace(given, **more)  # type: ignore[arg-type]


def facts(profile: Profile = PROFILE, platform: str = "cuda") -> Facts:
    devices = (DeviceFacts("card", "cuda:0", 24 * GIB, 24 * GIB),)
    plan = make_plan(PlanFacts(MODEL, profile, platform, devices, Overrides()))  # type: ignore[arg-type]
    return Facts(MODEL, profile, platform, devices, plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("manifest", "model", "name"),
    [
        ("prompts.csv", "Qwen/Qwen-Image", "prompts-Qwen-Image"),
        ("a/b/prompts.v2.jsonl", "./models/mine/", "prompts.v2-mine"),
        ("-", "builtin", "stdin-builtin"),
        ("folder/", "builtin", "folder-builtin"),
        ("my list.csv", "Qwen/Qwen-Image", "my_list-Qwen-Image"),
        ("../../etc.csv", "..", "etc"),
        ("nächte-夜.csv", "builtin", "nächte-夜-builtin"),
        ("x" * 300 + ".csv", "builtin", "x" * 100),
    ],
)
def test_the_default_folder_is_one_plain_name_below_results(manifest: str, model: str, name: str) -> None:
    found = default_folder(manifest, model)
    assert found.parent == Path("results")
    assert found.name.startswith(name)


@pytest.mark.parametrize(("devices", "workers", "ranks"), [(1, 3, 3), (1, None, 1), (2, None, 2), (2, 2, 2), (2, 3, None), (3, 2, None)])
def test_a_sharded_denoiser_has_a_process_a_device(devices: int, workers: int | None, ranks: int | None) -> None:
    asked = request(overrides=Overrides(fsdp=True), run=RunOptions(devices=("cpu",) * devices, workers=workers))
    found = device.probe(("cpu",) * devices)[1]
    if ranks is None:
        with pytest.raises(UsageError, match=f"--workers {workers} beside --fsdp and {devices} devices"):
            cpu_ranks(asked, "cpu", found)
    else:
        assert len(cpu_ranks(asked, "cpu", found)) == ranks


def test_what_the_user_says_wins_over_the_profile() -> None:
    found = with_profile(JobDefaults(steps=8, guidance=0.0), PROFILE)
    assert (found.width, found.steps, found.guidance, found.height) == (1328, 8, 0.0, None)
    assert isinstance(found.width, int)


@pytest.mark.parametrize(
    ("change", "alters"),
    [
        ({"manifest_options": ManifestOptions(defaults=JobDefaults(steps=8))}, True),
        ({"manifest_options": ManifestOptions(defaults=JobDefaults(negative_prompt="blurry"))}, True),
        ({"run": RunOptions(image_format="jpeg")}, True),
        ({"run": RunOptions(vae_tiling=True)}, True),
        ({"run": RunOptions(image_options=(("compress_level", 1),))}, False),
        ({"run": RunOptions(workers=2, threads=1, output="x", retry_failed=True, max_hours=1.0)}, False),
        ({"overrides": Overrides(performance_mode="memory", batch_size=1, dit_cpu_offload=True)}, False),
        ({"manifest_options": ManifestOptions(skip_invalid=True, name_template="{id}", limit=3)}, False),
        ({"manifest_options": ManifestOptions(defaults=JobDefaults(num_images=4))}, False),
    ],
)
def test_a_setting_is_refused_on_resume_only_if_it_alters_pixels(change: dict[str, object], alters: bool) -> None:
    assert (pixel_settings(request(**change), facts()) != pixel_settings(request(), facts())) is alters


def test_the_plan_and_the_device_are_no_part_of_a_jobs_identity() -> None:
    large = replace(facts(), devices=(DeviceFacts("other", "cuda:0", 80 * GIB, 80 * GIB),), platform="cuda")
    assert engine_pixels(request(), facts()) == engine_pixels(request(), large)
    assert engine_pixels(request(), facts()) == {"dtype.transformer": "bfloat16", "dtype.vae": "float32", "variant.vae": "fp16"}


@pytest.mark.parametrize(
    ("run", "task", "extension"),
    [
        (RunOptions(), "image", ".png"), (RunOptions(image_format="jpeg"), "image", ".jpg"), (RunOptions(image_format="webp"), "image", ".webp"),
        (RunOptions(), "video", ".mp4"), (RunOptions(video_format="webp"), "video", ".webp"), (RunOptions(video_format="png"), "video", ""),
    ],
)
def test_outputs_are_named_by_what_is_written(run: RunOptions, task: str, extension: str) -> None:
    found = manifest_options(request(run=run), facts(replace(PROFILE, task=task)))  # type: ignore[arg-type]
    assert found.extension == extension
    assert (found.model_name, found.model_revision) == ("Model", "c0ffee")


def test_one_host_budget_is_shared_by_all_worker_processes() -> None:
    assert host_share(None, 1) is None, "the only worker finds out by itself"
    assert host_share(30 * GIB, 1) == 30 * GIB
    assert host_share(None, 4, available_bytes=34 * GIB) == 8 * GIB, "two are left to the rest of the machine"
    assert host_share(20 * GIB, 4, available_bytes=34 * GIB) == 5 * GIB
    assert host_share(200 * GIB, 4, available_bytes=34 * GIB) == 8 * GIB, "no more than there is"
    assert host_share(None, 4, available_bytes=1 * GIB) == 0
    two = replace(facts(platform="cpu"), plan=replace(facts(platform="cpu").plan, replicas=1))
    settings = engine_settings(request(run=RunOptions(workers=2, host_memory_bytes=2 * 2**20)), two, RunFolder(Path("/x")))
    assert settings.host_memory_bytes == 2**20
