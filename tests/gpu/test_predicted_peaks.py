"""What the rehearsal predicts against what a real CUDA device's allocator counts, stage by stage: run with --run-gpu.

Small models at large sizes, so that activations are hundreds of MiB and the libraries' own workspaces do not decide.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import enginekit
from batchgen.events import MemorySample
from batchgen.execute import rehearse
from batchgen.execute.load import ModelFolder
from batchgen.execute.stages import DECODE, DENOISE, PIPELINE
from batchgen.jobs import Job, ShapeKey
from batchgen.plan.batching import Layout, stage_models
from batchgen.plan.records import Mode, Rehearsed

pytestmark = pytest.mark.gpu

MIB = 2**20
CUDA = "cuda:0"
NEAR = 0.05
# Matrix products and convolutions take workspaces of their own, which no rehearsal sees; the plan keeps memory back for them.
WORKSPACES_BYTES = 96 * MIB
ROWS = 2
PLACEMENTS: dict[str, Mode] = {"resident": "resident", "offloaded": "component-offload", "streamed": "layerwise-offload"}
CASES = [(family, placed) for family in ("qwen_image", "z_image", "flux", "sd3", "wan21") for placed in PLACEMENTS]


def shape_of(family: str) -> ShapeKey:
    frames = 17 if family.startswith("wan") else None
    side = 512 if frames else 1024
    return ShapeKey(side, side, frames, None, 3, 4.0, None, None, None, ())


def jobs_of(shape: ShapeKey) -> list[Job]:
    more: dict[str, Any] = {"num_frames": shape.num_frames} if shape.num_frames else {}
    ending = "mp4" if shape.num_frames else "png"
    return [
        enginekit.make_job(
            index, f"{rehearse.PROMPT}, number {index}", negative_prompt=" ", width=shape.width, height=shape.height, steps=shape.steps, guidance=shape.guidance,
            output=f"{index}.{ending}", **more)
        for index in range(ROWS)
    ]  # fmt: skip


def predicted(rehearsed: Rehearsed, modes: dict[str, Mode]) -> dict[str, int]:
    """Stage -> peak bytes on the device, without what the plan keeps back."""
    layout = Layout(modes, rehearsed)
    return {stage.name: layout.stage_weights(stage) + stage.activations.at(ROWS) for stage in stage_models(rehearsed.profiles)}


@pytest.mark.parametrize(("family", "placed"), CASES)
def test_predicted_peaks_are_those_of_the_device(
    family: str, placed: str, tiny_folder: Callable[[str], Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder, shape = tiny_folder(family), shape_of(family)
    names = ModelFolder.read(folder).models
    modes: dict[str, Mode] = dict.fromkeys(names, PLACEMENTS[placed])
    rehearsed = rehearse.rehearse(str(folder), dict.fromkeys(names, "bfloat16"), [shape], [1, ROWS])
    said = predicted(rehearsed, modes)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    plan = enginekit.make_plan(folder, modes={name: str(mode) for name, mode in modes.items()}, batch_size=ROWS)
    ran = enginekit.run_jobs(folder, tmp_path, jobs_of(shape), plan=plan, device=CUDA, dtype="bfloat16")
    assert not ran.failed
    measured = {event.when: event.device_peak_bytes - before for event in ran.of(MemorySample)}
    for stage, bytes_said in said.items():
        record_property(f"{stage} predicted/measured bytes", f"{bytes_said}/{measured[stage]}")
        # resident components are loaded when their first stage comes: earlier stages hold fewer weights than the plan counts
        later = 0 if placed != "resident" else sum(
            rehearsed.component(name).weights_bytes for name in names if name not in _loaded_by(rehearsed, stage))
        assert measured[stage] <= (bytes_said - later) * (1 + NEAR) + WORKSPACES_BYTES, stage
        if stage in (DENOISE, DECODE, PIPELINE):  # texts are encoded once for all rows that share them: less than is predicted
            assert measured[stage] >= (bytes_said - later) * (1 - NEAR), stage


def _loaded_by(rehearsed: Rehearsed, stage: str) -> set[str]:
    """Components of this stage and those before it."""
    found: set[str] = set()
    for profile in rehearsed.profiles:
        found |= set(profile.components)
        if profile.stage == stage:
            break
    return found
