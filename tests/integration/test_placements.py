"""Placements and recovery over the real engine: the same pictures whatever moves, the bytes planned, and jobs that fail alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import enginekit
from batchgen.events import ComponentMoved, DecisionMade, MemorySample, StageBatchDone
from batchgen.execute.load import ModelFolder
from batchgen.execute.memory import LiveLimit, LiveStorages
from batchgen.execute.moving import Weights
from batchgen.jobs import Job
from batchgen.plan.traffic import layerwise_bytes

PROMPTS = ("a red circle on a blue background", "a small green square", "a red circle")
OFFLOAD, LAYERWISE = "component-offload", "layerwise-offload"
DENOISERS = {"qwen_image": "transformer", "z_image": "transformer", "wan21": "transformer"}


def jobs_of(family: str, count: int = 3, *, steps: int = 2, **fields: Any) -> list[Job]:
    fields |= {"steps": steps}
    clip = {"num_frames": 5, "output": None} if family.startswith("wan") else {}
    made = []
    for index in range(count):
        more = clip | {"output": f"{index:03d}.{'mp4' if clip else 'png'}"} | fields
        made.append(enginekit.make_job(index, PROMPTS[index % len(PROMPTS)], **more))
    return made


def run(folder: Path, where: Path, jobs: list[Job], modes: dict[str, str], *, batch_size: int | None = 2, keep: int = 0, **more: Any) -> enginekit.Ran:
    placed = {name: modes.get(name, modes.get("*", "resident")) for name in ModelFolder.read(folder).models}
    plan = enginekit.make_plan(folder, modes=placed, batch_size=batch_size, keep_bytes=tuple((name, keep) for name in placed))
    return enginekit.run_jobs(folder, where, jobs, plan=plan, **more)


def moved_bytes(ran: enginekit.Ran) -> int:
    return sum(event.bytes for event in ran.of(ComponentMoved)) + sum(event.streamed_bytes for event in ran.of(StageBatchDone))


PLACEMENTS: dict[str, tuple[dict[str, str], int]] = {
    "component-offload": ({"*": OFFLOAD}, 0),
    "layerwise-offload, none kept": ({"*": LAYERWISE}, 0),
    "layerwise-offload, some kept": ({"*": LAYERWISE}, 60_000),
    "layerwise-offload, all kept": ({"*": LAYERWISE}, 2**30),
    "mixed": ({"text_encoder": LAYERWISE, "transformer": OFFLOAD, "vae": "resident"}, 0),
    "mixed the other way": ({"text_encoder": OFFLOAD, "transformer": LAYERWISE, "vae": OFFLOAD}, 60_000),
}


@pytest.fixture(scope="module")
def resident_runs(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], enginekit.Ran]:
    made: dict[str, enginekit.Ran] = {}

    def ran(family: str) -> enginekit.Ran:
        if family not in made:
            made[family] = run(tiny_folder(family), tmp_path_factory.mktemp("resident"), jobs_of(family), {})
        return made[family]

    return ran


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", DENOISERS)
def test_pictures_do_not_depend_on_the_placement(
    family: str, placement: str, tiny_folder: Callable[[str], Path], resident_runs: Callable[[str], enginekit.Ran], tmp_path: Path
) -> None:
    modes, keep = PLACEMENTS[placement]
    ran = run(tiny_folder(family), tmp_path, jobs_of(family), modes, keep=keep)
    want = resident_runs(family)
    assert not ran.failed
    assert ran.floats.keys() == want.floats.keys()
    for key, pixels in want.floats.items():
        assert np.array_equal(ran.floats[key], pixels), key
    assert moved_bytes(ran) > 0


@pytest.mark.parametrize("family", DENOISERS)
def test_batch_one_is_the_hand_called_pipeline(family: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """To the bit: Z-Image without guidance, the others with it. The hand-called pipeline computes with copies too (alignment)."""
    folder = tiny_folder(family)
    jobs = jobs_of(family, guidance=0.0 if family == "z_image" else 4.0, negative_prompt="blue")
    ran = run(folder, tmp_path, jobs, {"*": LAYERWISE, "vae": OFFLOAD}, batch_size=1, keep=60_000)
    pipe = enginekit.load_ordinary(folder)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            Weights.of(name, part, torch.device("cpu")).into()
    for job in jobs:
        assert np.array_equal(ran.floats[job.key], enginekit.call_by_hand(pipe, job)), job.key


def inside_after_each_move(ran: enginekit.Ran) -> list[set[str]]:
    found: list[set[str]] = [set()]
    for event in ran.of(ComponentMoved):
        found.append(found[-1] | {event.component} if event.direction == "in" else found[-1] - {event.component})
    return found


def test_two_experts_take_turns_on_the_device(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("wan22")
    want = run(folder, tmp_path / "resident", jobs_of("wan22", 2), {})
    ran = run(folder, tmp_path / "offload", jobs_of("wan22", 2), {"*": OFFLOAD})
    assert not ran.failed
    assert all(np.array_equal(ran.floats[key], pixels) for key, pixels in want.floats.items())
    assert not any({"transformer", "transformer_2"} <= inside for inside in inside_after_each_move(ran))
    assert {"transformer", "transformer_2"} <= {event.component for event in ran.of(ComponentMoved)}


def test_weights_move_once_a_window_not_once_a_picture(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    ran = run(tiny_folder("z_image"), tmp_path, jobs_of("z_image", 8), {"*": OFFLOAD}, windows=2)
    ins = [event.component for event in ran.of(ComponentMoved) if event.direction == "in" and event.bytes]
    assert ins == ["text_encoder", "transformer", "vae", "transformer", "vae"], "the second window's prompts were encoded before"


def test_the_whole_pipeline_as_one_stage_holds_one_component_at_a_time(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("pixart_sigma")
    want = run(folder, tmp_path / "resident", jobs_of("pixart_sigma", 2), {})
    ran = run(folder, tmp_path / "offload", jobs_of("pixart_sigma", 2), {"*": OFFLOAD})
    assert not ran.failed
    assert all(np.array_equal(ran.floats[key], pixels) for key, pixels in want.floats.items())
    assert max(map(len, inside_after_each_move(ran))) == 1


# -- the ladder -----------------------------------------------------------------------------------------------------


def decisions(ran: enginekit.Ran) -> list[tuple[str, str]]:
    return [(event.subject.split()[0], event.decision) for event in ran.of(DecisionMade) if event.rule == "out-of-memory"]


def assert_same_pictures(ran: enginekit.Ran, want: enginekit.Ran, *, grey_levels: float = 0.0) -> None:
    assert {event.key for event in ran.done} == {event.key for event in want.done}
    for key, pixels in want.floats.items():
        assert float(np.abs(ran.floats[key] - pixels).max() * 255) <= grey_levels, key


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Z-Image whose blocks weigh more than what stands around them, so that streaming them saves something."""
    import diffusers

    import tiny

    folder = tmp_path_factory.mktemp("deep") / "z_image"
    tiny.z_image(folder)
    transformer = tiny.made(
        diffusers.ZImageTransformer2DModel, in_channels=4, dim=32, n_layers=24, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=32,
        axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
    )
    with torch.no_grad():
        transformer.x_pad_token.normal_(), transformer.cap_pad_token.normal_()
    transformer.save_pretrained(folder / "transformer")
    return folder


def free_plan(folder: Path, **more: Any) -> Any:
    """Everything resident by default: the ladder may place it elsewhere."""
    return enginekit.make_plan(folder, **more)


def limited(folder: Path, where: Path, jobs: list[Job], limit: int, plan: Any, **more: Any) -> tuple[enginekit.Ran, int]:
    with LiveLimit("cpu", limit) as meter:
        ran = enginekit.run_jobs(folder, where, jobs, plan=plan, **more)
    assert meter.peak <= limit
    return ran, meter.refused


def peaks(ran: enginekit.Ran) -> dict[str, int]:
    """Stage -> its peak on the device."""
    found: dict[str, int] = {}
    for event in ran.of(MemorySample):
        found[event.when] = max(found.get(event.when, 0), event.device_peak_bytes)
    return found


def metered(folder: Path, where: Path, jobs: list[Job], plan: Any, **more: Any) -> tuple[enginekit.Ran, dict[str, int]]:
    with LiveStorages("cpu"):
        ran = enginekit.run_jobs(folder, where, jobs, plan=plan, **more)
    assert not ran.failed
    return ran, peaks(ran)


def test_rung_one_halves_the_batch_and_remembers(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder, jobs = tiny_folder("qwen_image"), jobs_of("qwen_image", 8, steps=2)
    want, by_four = metered(folder, tmp_path / "want", jobs[:4], free_plan(folder, batch_size=4))
    _, by_two = metered(folder, tmp_path / "two", jobs[:4], free_plan(folder, batch_size=2))
    limit = (by_two["decode"] + by_four["decode"]) // 2
    ran, refused = limited(folder, tmp_path / "ran", jobs, limit, free_plan(folder, batch_size=4))
    assert len(ran.done) == 8
    assert decisions(ran) == [("decode", "halve")]
    assert refused == 1, "the limit is remembered for the second batch"
    assert max(event.size for event in ran.of(StageBatchDone) if event.stage == "decode") == 2
    for key, pixels in want.floats.items():
        assert float(np.abs(ran.floats[key] - pixels).max() * 255) <= 1


def test_rung_two_decodes_in_tiles_and_says_so_in_the_picture(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The tiny VAE tiles from 64 pixels on. Tiles alter pixels: the picture equals that of a run that tiles from the start."""
    folder, jobs = tiny_folder("z_image"), jobs_of("z_image", 2, width=256, height=256, steps=2)
    placed = dict.fromkeys(ModelFolder.read(folder).models, "resident")
    plan = enginekit.make_plan(folder, modes=placed, batch_size=1)
    _, whole = metered(folder, tmp_path / "whole", jobs, plan)
    with LiveStorages("cpu"):
        want = enginekit.run_jobs(folder, tmp_path / "want", jobs, plan=plan, vae_tiling=True)
    limit = (peaks(want)["decode"] + whole["decode"]) // 2
    ran, refused = limited(folder, tmp_path / "ran", jobs, limit, plan)
    assert decisions(ran) == [("decode", "tile")]
    assert refused == 1
    assert_same_pictures(ran, want)
    assert all("tiled" in event.flags for event in ran.done)


def test_rung_three_goes_to_leaner_placements(deep_folder: Path, tmp_path: Path) -> None:
    jobs = jobs_of("z_image", 3, steps=2)
    want, resident = metered(deep_folder, tmp_path / "want", jobs, free_plan(deep_folder, batch_size=1))
    lean_modes = {"text_encoder": OFFLOAD, "transformer": LAYERWISE, "vae": OFFLOAD}
    _, lean = metered(deep_folder, tmp_path / "lean", jobs, enginekit.make_plan(deep_folder, modes=lean_modes, batch_size=1))
    limit = (2 * max(lean.values()) + resident["denoise"]) // 3
    ran, _ = limited(deep_folder, tmp_path / "ran", jobs, limit, free_plan(deep_folder, batch_size=1))
    assert ("denoise", "leaner") in decisions(ran)
    assert ran.engine is not None
    assert ran.engine.residency.mode("transformer") == LAYERWISE
    assert_same_pictures(ran, want)


def test_what_the_user_placed_is_not_moved_by_the_ladder(deep_folder: Path, tmp_path: Path) -> None:
    jobs = jobs_of("z_image", 1, steps=2)
    placed = dict.fromkeys(ModelFolder.read(deep_folder).models, "resident")
    plan = enginekit.make_plan(deep_folder, modes=placed, batch_size=1)
    _, resident = metered(deep_folder, tmp_path / "want", jobs, plan)
    ran, _ = limited(deep_folder, tmp_path / "ran", jobs, resident["denoise"] - 10_000, plan)
    assert [(event.kind, event.stage) for event in ran.failed] == [("out-of-memory", "denoise")]
    assert decisions(ran) == [("denoise", "fail")]


@pytest.mark.parametrize("placed_by_user", [True, False], ids=["placements fixed", "placements free"])
def test_the_last_rung_fails_one_job_between_two_that_succeed(deep_folder: Path, tmp_path: Path, placed_by_user: bool) -> None:
    small, big = jobs_of("z_image", 3, steps=1), jobs_of("z_image", 3, steps=1, width=384, height=384)
    jobs = [small[0], big[1], small[2]]
    placed = dict.fromkeys(ModelFolder.read(deep_folder).models, "resident") if placed_by_user else {}
    plan = enginekit.make_plan(deep_folder, modes=placed, batch_size=1)
    want, fits = metered(deep_folder, tmp_path / "want", [small[0], small[2]], plan, windows=2)
    ran, _ = limited(deep_folder, tmp_path / "ran", jobs, max(fits.values()) + 100_000, plan, windows=3)
    (failed,) = ran.failed
    assert (failed.key, failed.kind) == (big[1].key, "out-of-memory")
    assert_same_pictures(ran, want)
    assert ran.engine is not None
    assert all(ran.engine.residency.mode(name) == "resident" for name in ran.engine.residency.names), "the night goes on as planned"


def test_a_hopeless_shape_is_not_tried_for_ever(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("z_image")
    placed = dict.fromkeys(ModelFolder.read(folder).models, "resident")
    plan = enginekit.make_plan(folder, modes=placed, batch_size=1)
    _, fits = metered(folder, tmp_path / "fits", jobs_of("z_image", 2, steps=1), plan, windows=2)
    big = jobs_of("z_image", 5, steps=1, width=256, height=256)
    ran, refused = limited(folder, tmp_path / "ran", big, max(fits.values()) + 50_000, plan)
    assert [event.kind for event in ran.failed] == ["out-of-memory"] * 5
    tried = decisions(ran)
    assert [action for _, action in tried if action == "fail"] == ["fail"] * 2
    assert refused == len(tried)


def test_a_failed_decode_keeps_its_latents(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Only the decode is tried again: the denoiser is called as often as without a limit."""
    folder, jobs = tiny_folder("qwen_image"), jobs_of("qwen_image", 4, steps=2)
    want, by_four = metered(folder, tmp_path / "want", jobs, free_plan(folder, batch_size=4))
    ran, _ = limited(folder, tmp_path / "ran", jobs, by_four["decode"] - 100_000, free_plan(folder, batch_size=4))
    assert denoiser_calls(ran) == denoiser_calls(want)


def denoiser_calls(ran: enginekit.Ran) -> int:
    return sum(calls for event in ran.of(StageBatchDone) if event.stage == "denoise" for name, calls, _ in event.compute if name == "transformer")


# -- bytes and pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 60_000, 2**30], ids=["none kept", "some kept", "all kept"])
def test_bytes_moved_are_the_arithmetic_of_the_placement(deep_folder: Path, tmp_path: Path, keep: int) -> None:
    ran = run(deep_folder, tmp_path, jobs_of("z_image", 4, steps=2), {"*": LAYERWISE, "vae": OFFLOAD}, windows=2, keep=keep)
    assert ran.engine is not None
    modules = ran.engine.components.modules
    expected = 2 * sum(parameter.nbytes for parameter in modules["vae"].parameters())
    for name, stage in (("text_encoder", "text_encoder"), ("transformer", "denoise")):
        stream = ran.engine.residency._held[name].stream
        assert stream is not None
        called = [block for block in stream.blocks if block.kept is not None or block.place is not None]
        called.sort(key=lambda block: -1 if block.place is None else block.place)
        visits: dict[int, int] = {}
        for event in ran.of(StageBatchDone):
            if event.stage == stage:
                visits[event.window] = visits.get(event.window, 0) + sum(calls for part, calls, _ in event.compute if part == name)
        sizes = [block.size_bytes for block in called]
        expected += layerwise_bytes(stream.outside.bytes_in, sizes, kept=stream.kept_blocks, depth=2, visits=list(visits.values()))
    assert moved_bytes(ran) == expected


@pytest.mark.parametrize("mode", [OFFLOAD, LAYERWISE])
def test_resident_memory_does_not_grow_over_two_hundred_pictures(mode: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("z_image")
    jobs = jobs_of("z_image", 200, steps=1)
    ran = run(folder, tmp_path, jobs, {"*": mode}, batch_size=10, windows=20)
    assert len(ran.done) == 200
    decoded = [event.rss_bytes for event in ran.of(MemorySample) if event.when == "decode"]
    assert decoded[-1] <= decoded[1] * 1.05
