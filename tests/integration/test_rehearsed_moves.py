"""Moves on a GPU that is not there: hollow components on fake `cuda:0`, moved by the engine's own residency.

Fake tensors refuse to mix devices as a GPU does, so a component that was forgotten on the host is an error here too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.execute import hollow_model
from batchgen.execute.load import ModelFolder
from batchgen.execute.memory import HostBudget
from batchgen.execute.residency import Residency
from batchgen.plan.batching import Layout
from batchgen.plan.records import Mode, Rehearsed, RehearsedComponent
from batchgen.rehearsal import hollow
from batchgen.rehearsal.calls import Scene

CUDA = torch.device("cuda:0")


@pytest.fixture
def parts(tiny_folder: Callable[[str], Path]) -> tuple[Scene, dict[str, torch.nn.Module]]:
    folder = tiny_folder("qwen_image")
    read = ModelFolder.read(folder)
    scene = Scene()
    hollows = hollow_model.HollowFolder(read.path, read.pipeline_class, read.entries, read.settings, read.absent)
    return scene, {name: hollow_model.hollow_component(hollows, name, torch.float32, scene) for name in read.models}


def residency(parts: tuple[Scene, dict[str, torch.nn.Module]], modes: dict[str, Mode]) -> Residency:
    scene, modules = parts
    held = Residency(modes, CUDA, host_budget=HostBudget(2**40), emit=lambda event: None)
    with scene.fake:
        for name, module in modules.items():
            held.add(name, module)
    return held


def first_layer(scene: Scene, module: torch.nn.Module) -> torch.Tensor:
    """The transformer's first layer over latents [1, 16, 16] on the fake device."""
    with scene.fake, torch.no_grad():
        made: torch.Tensor = module.img_in(torch.zeros(1, 16, 16, device=CUDA))
    return made


MODES: dict[str, Mode] = {"text_encoder": "component-offload", "transformer": "component-offload", "vae": "resident"}


def test_an_offloaded_component_computes_on_the_device_while_its_stage_is_open(
    parts: tuple[Scene, dict[str, torch.nn.Module]],
) -> None:
    scene, modules = parts
    held = residency(parts, MODES)
    with scene.fake, held.stage(["transformer"]):
        assert {parameter.device for parameter in modules["transformer"].parameters()} == {CUDA}
        assert first_layer(scene, modules["transformer"]).device == CUDA


def test_a_component_left_on_the_host_is_an_error(parts: tuple[Scene, dict[str, torch.nn.Module]]) -> None:
    scene, modules = parts
    with pytest.raises(RuntimeError, match=r"cuda:0.*cpu|cpu.*cuda:0"):
        first_layer(scene, modules["transformer"])


def test_a_component_whose_stage_is_over_is_an_error(parts: tuple[Scene, dict[str, torch.nn.Module]]) -> None:
    scene, modules = parts
    held = residency(parts, MODES)
    with scene.fake, held.stage(["transformer"]):
        pass
    with pytest.raises(RuntimeError, match="transformer"):
        first_layer(scene, modules["transformer"])


@pytest.mark.parametrize("windows", [1, 3])
def test_bytes_moved_over_windows_are_those_the_plan_predicts(
    parts: tuple[Scene, dict[str, torch.nn.Module]],
    windows: int,
) -> None:
    scene, _ = parts
    held = residency(parts, MODES)
    for _ in range(windows):
        for names in (["text_encoder"], ["transformer"], ["vae"]):
            with scene.fake, held.stage(names):
                pass
    rehearsed = Rehearsed(tuple(
        RehearsedComponent(name, hollow.weight_bytes(module), 0, staying_bytes=hollow_model.staying_bytes(name, module))
        for name, module in _fresh(parts).items()), ())  # fmt: skip
    layout = Layout(MODES, rehearsed)
    openings = sum(layout.entering_bytes(name) for name, mode in MODES.items() if mode == "component-offload")
    predicted = layout.moved_once(MODES) + windows * openings
    assert sum(held.bytes_in.values()) == predicted


def _fresh(parts: tuple[Scene, dict[str, torch.nn.Module]]) -> dict[str, torch.nn.Module]:
    """The same components, never moved: what they weigh."""
    scene, modules = parts
    made = {}
    for name, module in modules.items():
        config = getattr(module, "config")  # noqa: B009  a plain attribute that mypy does not know
        library = "transformers" if name == "text_encoder" else "diffusers"
        made[name] = hollow.build(type(module), config, torch.float32, scene, library=library)
    return made
