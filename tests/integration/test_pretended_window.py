"""Whole windows on a GPU that is not there: the engine itself, its moves and its batches, over hollow components on fake `cuda:0`.

What was moved must be what the plan said, to the byte, and a component that was forgotten on the host must be an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import enginekit
from batchgen.events import OutputDone
from batchgen.execute import hollow_model, rehearse
from batchgen.execute.load import ModelFolder
from batchgen.execute.request import window_sizes
from batchgen.execute.residency import Residency
from batchgen.execute.settings import Window
from batchgen.inventory.records import ComponentFacts, DeviceFacts, DeviceRates, ModelFacts, Profile
from batchgen.jobs import Job, ShapeKey
from batchgen.plan.fit import FitOptions, fit_plan
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Overrides, Plan, PlanFacts, Rehearsed, Workload
from batchgen.rehearsal.calls import Scene
from pretended import PretendedDevice

TinyFolder = Callable[[str], Path]
GIB = 2**30
JOBS = 11
# what it shows -> (family, placements by name; "*" for the others)
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "all offloaded": ("qwen_image", {"*": "component-offload"}),
    "the decoder stays": ("qwen_image", {"*": "component-offload", "vae": "resident"}),
    "all stay": ("qwen_image", {"*": "resident"}),
    "two experts take turns": ("wan22", {"*": "component-offload"}),
    "three text encoders": ("sd3", {"*": "component-offload", "transformer": "resident"}),
    "a whole pipeline, one component at a time": ("lumina2", {"*": "component-offload"}),
}

LONG = {"two experts take turns", "the decoder stays", "three text encoders", "a whole pipeline, one component at a time"}


def shape_of(family: str) -> ShapeKey:
    return ShapeKey(64, 64, 5 if family.startswith("wan") else None, None, 2, 4.0, None, None, None, ())


def jobs_of(family: str) -> list[Job]:
    clip = {"num_frames": 5} if family.startswith("wan") else {}
    made = [
        enginekit.make_job(index, f"picture number {index} of a red circle", negative_prompt=" ", steps=2, guidance=4.0, **clip)
        for index in range(JOBS)
    ]
    return [replace(job, output=f"{job.id}.mp4") for job in made] if clip else made


def planned(rehearsed: Rehearsed, family: str, placed: dict[str, str]) -> Plan:
    """What `plan` says for a card with memory enough, with every component placed by hand."""
    names = [part.name for part in rehearsed.components]
    said = ",".join(f"{name}={placed.get(name, placed['*'])}" for name in names)
    facts = ModelFacts("tiny", "facts", None, "", None, tuple(
        ComponentFacts(part.name, "diffusers", "X", part.weights_bytes, None) for part in rehearsed.components))  # fmt: skip
    device = DeviceFacts("card", "cuda:0", 24 * GIB, 24 * GIB)
    asked = PlanFacts(facts, Profile("tiny", "image"), "cuda", (device,), Overrides(component_residency=said, batch_size=2))
    rates = DeviceRates(dense_bf16_flops=1e6, memory_bytes=1e12, host_link_bytes=30e9)  # so slow that windows are short
    return fit_plan(make_plan(asked), asked, rehearsed, Workload(((shape_of(family).text, JOBS),)), FitOptions(rates=rates))


class HollowLoading(ModelFolder):
    """A model folder that loads hollow weights, onto the host: the placements bring them where they belong."""

    scene: Scene
    pretended: PretendedDevice

    def load_model(self, name: str, dtype: torch.dtype, **more: Any) -> torch.nn.Module:
        read = hollow_model.HollowFolder(self.path, self.pipeline_class, self.entries, self.settings, self.absent)
        return self.pretended.component(hollow_model.hollow_component(read, name, dtype, self.scene))


def engine_on(folder: Path, where: Path, ran: enginekit.Ran, plan: Plan) -> tuple[Any, PretendedDevice]:
    scene = Scene()
    pretended = PretendedDevice(scene.fake)
    with pretended:
        engine = enginekit.engine_for(folder, where, ran, plan=plan, device="cuda:0", spool_latents=False)
    loading = object.__new__(HollowLoading)
    for field in ModelFolder.__dataclass_fields__:
        object.__setattr__(loading, field, getattr(engine.folder, field))
    object.__setattr__(loading, "scene", scene)
    object.__setattr__(loading, "pretended", pretended)
    engine.components.folder = loading
    engine.cache.tells_apart = True  # hollow encoders give the same for every text
    return engine, pretended


def render(engine: Any, pretended: PretendedDevice, plan: Plan, jobs: list[Job]) -> None:
    """All jobs in windows as the supervisor makes them."""
    first, size = window_sizes(plan)
    cuts = [0, *range(first, len(jobs), size), len(jobs)]
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        with pretended, torch.no_grad():
            engine.run_window(Window(number, tuple(jobs[start:end])))
    engine.products.finish()


@pytest.fixture(scope="session")
def rehearsals(tiny_folder: TinyFolder) -> Callable[[str], Rehearsed]:
    found: dict[str, Rehearsed] = {}

    def of(family: str) -> Rehearsed:
        if family not in found:
            folder = tiny_folder(family)
            dtypes = dict.fromkeys(ModelFolder.read(folder).models, "float32")
            found[family] = rehearse.rehearse(str(folder), dtypes, [shape_of(family)], [1, 2])
        return found[family]

    return of


@pytest.mark.parametrize(
    ("family", "placed"),
    [pytest.param(*case, id=name, marks=pytest.mark.long if name in LONG else ()) for name, case in CASES.items()],
)
def test_the_engine_moves_what_the_plan_says(
    family: str, placed: dict[str, str], tiny_folder: TinyFolder, rehearsals: Callable[[str], Rehearsed], tmp_path: Path
) -> None:
    ran = enginekit.Ran()
    plan = planned(rehearsals(family), family, placed)
    engine, pretended = engine_on(tiny_folder(family), tmp_path, ran, plan)
    render(engine, pretended, plan, jobs_of(family))
    assert [event.reason for event in ran.failed] == []
    assert len(ran.of(OutputDone)) == JOBS
    assert sum(engine.residency.bytes_in.values()) == plan.predicted.bytes_moved


def test_a_component_that_was_forgotten_on_the_host_is_an_error(
    tiny_folder: TinyFolder, rehearsals: Callable[[str], Rehearsed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = enginekit.Ran()
    plan = planned(rehearsals("qwen_image"), "qwen_image", {"*": "component-offload"})
    engine, pretended = engine_on(tiny_folder("qwen_image"), tmp_path, ran, plan)
    add = Residency.add

    def forgetting(self: Residency, name: str, module: torch.nn.Module) -> None:
        if name != "transformer":
            add(self, name, module)

    monkeypatch.setattr(Residency, "add", forgetting)
    render(engine, pretended, plan, jobs_of("qwen_image"))
    assert {event.stage for event in ran.failed} == {"denoise"}
    assert all("cuda:0" in event.reason and "cpu" in event.reason for event in ran.failed), ran.failed[0].reason
    assert ran.of(OutputDone) == []
