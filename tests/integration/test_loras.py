"""LoRAs through the engine: switched between batches, the same pictures as the ordinary pipeline, placements untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import enginekit
from batchgen.errors import ModelError
from batchgen.events import ComponentLoaded, StageBatchDone
from batchgen.execute.load import ModelFolder
from batchgen.execute.loras import Loras

peft = pytest.importorskip("peft")
PLACEMENTS = {
    "resident": {}, "component-offload": {"*": "component-offload"}, "layerwise-offload": {"*": "layerwise-offload"},
}


def make_lora(folder: Path, where: Path, parts: dict[str, list[str]], seed: int) -> str:
    """A LoRA with random weights for the named layers of a model's components, as its pipeline saves them. Returns the file."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), local_files_only=True)
    torch.manual_seed(seed)
    layers = {}
    for name, targets in parts.items():
        module = getattr(pipe, name)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        peft.inject_adapter_in_model(config, module)
        module.peft_config = {"default": config}
        layers[f"{name}_lora_layers"] = peft.get_peft_model_state_dict(module)
    type(pipe).save_lora_weights(str(where), **layers)
    return str(where / "pytorch_lora_weights.safetensors")


def run(folder: Path, where: Path, jobs: list[Any], loras: tuple[tuple[str, str, float], ...], modes: dict[str, str], **more: Any) -> enginekit.Ran:
    names = ModelFolder.read(folder).models
    placed = {name: modes.get(name, modes.get("*", "resident")) for name in names}
    plan = enginekit.make_plan(folder, modes=placed, batch_size=more.pop("batch_size", 1))
    return enginekit.run_jobs(folder, where, jobs, plan=plan, loras=loras, **more)


@pytest.fixture(scope="module")
def two_loras(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str, float], ...]:
    folder, place = tiny_folder("z_image"), tmp_path_factory.mktemp("loras")
    layers = {"transformer": ["to_q", "to_v"]}
    return tuple((name, make_lora(folder, place / name, layers, seed), weight) for name, seed, weight in (("ink", 1, 1.0), ("oil", 2, 0.5)))


ASKED = ("ink", None, "oil", "ink:0.25", "none", "oil")


@pytest.mark.filterwarnings("ignore:Already found a .peft_config.:UserWarning")  # of the ordinary pipeline's second LoRA
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_alternating_loras_are_those_of_the_ordinary_pipeline(
    placement: str, two_loras: Any, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder("z_image")
    jobs = [enginekit.make_job(n, "a red circle", steps=2, seed=5, guidance=0.0, lora=lora) for n, lora in enumerate(ASKED)]
    ran = run(folder, tmp_path, jobs, two_loras, PLACEMENTS[placement])
    assert not ran.failed
    pipe = enginekit.load_ordinary(folder)
    for name, path, _ in two_loras:
        pipe.load_lora_weights(path, adapter_name=name)
    scales = {name: weight for name, _, weight in two_loras}
    pictures = {}
    for job in jobs:
        if job.lora in (None, "none"):
            pipe.disable_lora()
        else:
            name, _, weight = job.lora.partition(":")
            pipe.enable_lora()
            pipe.set_adapters([name], [float(weight) if weight else scales[name]])
        pictures[job.lora] = enginekit.call_by_hand(pipe, job)
        assert np.abs(ran.floats[job.key] - pictures[job.lora]).max() < 1e-4, job.lora
    assert np.abs(pictures["ink"] - pictures["oil"]).max() > 1e-3
    assert np.abs(pictures["ink"] - pictures[None]).max() > 1e-3
    assert np.abs(pictures["ink"] - pictures["ink:0.25"]).max() > 1e-3


def test_rows_are_grouped_by_lora_and_placements_are_the_same_with_and_without(
    two_loras: Any, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder("z_image")
    jobs = [enginekit.make_job(n, "a red circle", steps=2, lora=("ink", "oil")[n % 2]) for n in range(6)]
    ran = run(folder, tmp_path / "with", jobs, two_loras, {"*": "layerwise-offload"}, batch_size=3)
    plain = run(folder, tmp_path / "without", [enginekit.make_job(0, "a red circle", steps=2)], (), {"*": "layerwise-offload"})
    batches = [event for event in ran.of(StageBatchDone) if event.stage == "denoise"]
    assert [event.size for event in batches] == [3, 3]
    assert [len({jobs[int(key, 16)].lora for key in event.keys}) for event in batches] == [1, 1]
    placements = [[(event.component, event.placement) for event in one.of(ComponentLoaded)] for one in (ran, plain)]
    assert placements[0] == placements[1]


def test_a_lora_for_one_expert_is_for_both(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("wan22")
    path = make_lora(folder, tmp_path / "lora", {"transformer": ["to_q"]}, 1)
    jobs = [enginekit.make_job(n, "a red circle", steps=3, num_frames=5, output=f"{n}.mp4", seed=5, lora=lora) for n, lora in enumerate(("ink", None))]
    ran = run(folder, tmp_path / "run", jobs, (("ink", path, 1.0),), {"*": "component-offload"})
    assert not ran.failed
    assert ran.engine is not None
    for name in ("transformer", "transformer_2"):
        assert "ink" in ran.engine.components.modules[name].peft_config
    assert np.abs(ran.floats[jobs[0].key] - ran.floats[jobs[1].key]).max() > 1e-3


def test_equal_prompts_are_encoded_once_a_lora_where_the_text_encoder_has_one(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("sdxl")
    path = make_lora(folder, tmp_path / "lora", {"unet": ["to_q"], "text_encoder": ["q_proj", "v_proj"]}, 1)
    asked = (None, "ink", None, "ink")
    jobs = [enginekit.make_job(n, "a red circle", steps=2, seed=5, lora=lora) for n, lora in enumerate(asked)]
    ran = run(folder, tmp_path / "run", jobs, (("ink", path, 1.0),), {"*": "component-offload"}, batch_size=2)
    assert not ran.failed
    pictures = [ran.floats[job.key] for job in jobs]
    assert np.array_equal(pictures[0], pictures[2])
    assert np.array_equal(pictures[1], pictures[3])
    assert np.abs(pictures[0] - pictures[1]).max() > 1e-3
    assert ran.engine is not None
    assert "ink" in ran.engine.components.modules["text_encoder"].peft_config
    assert sum(event.size for event in ran.of(StageBatchDone) if event.stage == "text_encoder") == 2


def test_a_lora_of_another_model_is_refused_by_name(two_loras: Any, tiny_folder: Callable[[str], Path]) -> None:
    loras = Loras.read(two_loras[:1], "ZImagePipeline")
    other = ModelFolder.read(tiny_folder("wan21")).load_model("transformer", torch.float32)
    with pytest.raises(ModelError, match="LoRA ink does not fit transformer"):
        loras.attach("transformer", other)


def test_a_model_that_takes_no_lora_says_so(two_loras: Any) -> None:
    with pytest.raises(ModelError, match="PixArtSigmaPipeline takes no LoRA"):
        Loras.read(two_loras, "PixArtSigmaPipeline")
