"""What was found when the model families were taken apart, one test for each pitfall not already named by another test.

Numbers are those of the list of pitfalls: 2 and 17 are in test_engine.py, 16 in test_picture_inputs.py; 8 and 19 to 21 are the rehearsal's,
24 to 26 the placements'; 11, 12, 14 and 18 are held by every row of the table in test_families.py.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from batchgen.errors import ModelError
from batchgen.events import ComponentLoaded, ComponentMoved, DecisionMade, StageBatchDone
from batchgen.execute.families import find_family
from batchgen.execute.load import ModelFolder, check_loaded
from batchgen.execute.meter import Meter
from batchgen.execute.settings import Window
from batchgen.execute.stages import Item, Stages, build_stages, join_rows, split_rows
from batchgen.execute.windows import EncodedCache
from conftest import TinyFolder
from enginekit import Ran, call_by_hand, engine_for, load_ordinary, make_job, make_plan, run_jobs

CPU = torch.device("cpu")


def stages_of(folder: Path, dtype: torch.dtype = torch.float32) -> Stages:
    read = ModelFolder.read(folder)
    return build_stages(read, CPU, dict.fromkeys(read.models, dtype))


def test_pitfall_01_a_stage_knows_the_parts_it_does_not_own_by_weightless_copies(tiny_folder: TinyFolder) -> None:
    stages = stages_of(tiny_folder("wan21"), torch.bfloat16)
    denoise = stages.named("denoise")
    assert denoise.components == ("transformer",)
    assert denoise.consulted == ("vae",)
    copy = denoise.pipe.vae
    assert all(weight.is_meta for weight in copy.parameters())
    assert copy.dtype == torch.bfloat16
    assert "vae" not in denoise.pipe.components  # never moved or counted
    assert denoise.pipe.num_channels_latents == 4  # the family's usual model has 16


def test_pitfall_01_buffers_that_a_stage_reads_are_real_in_the_copy(tiny_folder: TinyFolder) -> None:
    copy = stages_of(tiny_folder("ltx2")).named("denoise").pipe.vae
    assert copy.latents_mean.device == CPU
    assert torch.isfinite(copy.latents_mean).all()


@pytest.mark.parametrize(
    ("pipeline", "settings", "blocks"),
    [
        ("HunyuanVideo15Pipeline", {}, "HunyuanVideo15AutoBlocks"),
        ("LTX2Pipeline", {}, "LTX2AutoBlocks"),
        ("WanPipeline", {"boundary_ratio": None, "expand_timesteps": False}, "WanBlocks"),
        ("WanPipeline", {"boundary_ratio": 0.875, "expand_timesteps": False}, "Wan22Blocks"),
        ("WanPipeline", {"boundary_ratio": None, "expand_timesteps": True}, None),
        ("Flux2KleinPipeline", {"is_distilled": True}, "Flux2KleinAutoBlocks"),
        ("Flux2KleinPipeline", {"is_distilled": False}, "Flux2KleinBaseAutoBlocks"),
        ("PixArtSigmaPipeline", {}, None),
        ("QwenImageImg2ImgPipeline", {}, None),
    ],
)
def test_pitfall_03_the_table_decides_which_blocks_split_a_pipeline(pipeline: str, settings: dict[str, object], blocks: str | None) -> None:
    family = find_family(pipeline, settings)
    assert (family.blocks if family is not None else None) == blocks


def test_pitfall_04_a_weight_that_is_in_no_file_is_an_error() -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match="text_encoder: 1 weights are not in its files, bias first"):
        check_loaded("text_encoder", linear, ["bias"], torch.float32)
    tied = torch.nn.ModuleDict({"shared": torch.nn.Embedding(3, 2), "tokens": torch.nn.Embedding(3, 2)})
    tied["tokens"].weight = tied["shared"].weight
    check_loaded("text_encoder", tied, ["tokens.weight"], torch.float32)


def test_pitfall_04_weights_on_meta_or_not_numbers_or_of_another_dtype_are_errors() -> None:
    with pytest.raises(ModelError, match="weight was not loaded"):
        check_loaded("vae", torch.nn.Linear(2, 2, device="meta"), [], torch.float32)
    broken = torch.nn.Linear(2, 2)
    broken.weight.data[0, 0] = float("inf")
    with pytest.raises(ModelError, match="weight holds values that are not numbers"):
        check_loaded("vae", broken, [], torch.float32)
    with pytest.raises(ModelError, match=r"asked for torch\.bfloat16, loaded as torch\.float32"):
        check_loaded("vae", torch.nn.Linear(2, 2), [], torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("sdxl", ["text_encoder", "denoise", "decode"]),  # not ip_adapter, which lists the unet
        ("qwen_image", ["text_encoder", "denoise", "decode"]),  # not controlnet_vae_encoder
        ("ltx2", ["text_encoder", "denoise", "decode"]),  # not duration, whose head the folder lacks
    ],
)
def test_pitfall_05_stages_whose_trigger_is_absent_are_left_out(family: str, names: list[str], tiny_folder: TinyFolder) -> None:
    stages = stages_of(tiny_folder(family))
    assert [stage.name for stage in stages.stages] == names
    owners = [name for stage in stages.stages for name in stage.components]
    assert "vae" not in stages.named("denoise").components
    assert set(owners) == set(stages.folder.models)


def test_pitfall_06_a_prompt_encoded_again_gives_the_same(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    ran = Ran()
    engine = engine_for(tiny_folder("z_image"), tmp_path, ran)
    for number in range(2):
        engine.cache = EncodedCache(engine.residency.host_budget)
        engine.run_window(Window(number, (make_job(number, "x", seed=1, steps=2),)))
    assert len(ran.done) == 2
    encodes = [event for event in ran.of(StageBatchDone) if event.stage == "text_encoder"]
    assert len(encodes) == 2
    first, second = (np.asarray(Image.open(tmp_path / "outputs" / f"{number:03d}.png")) for number in range(2))
    assert (first == second).all()


@pytest.mark.parametrize("family", ["flux", "flux2_klein", "sd3", "sdxl"])
def test_pitfall_07_latents_of_another_dtype_than_the_vae_are_decoded(family: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder(family)
    dtypes = tuple((name, "float32" if name == "vae" else "bfloat16") for name in ModelFolder.read(folder).models)
    ran = run_jobs(folder, tmp_path, [make_job(0, "x", steps=2)], dtypes=dtypes)
    assert ran.failed == []


def test_pitfall_09_nothing_is_printed(tiny_folder: TinyFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder("wan21")
    capfd.readouterr()
    ran = run_jobs(folder, tmp_path, [make_job(0, "x", num_frames=5, steps=2, output="0.mp4")])
    assert ran.failed == []
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_pitfall_13_a_schedulers_state_does_not_pass_to_the_next_batch(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("wan21")  # UniPC keeps its last model outputs
    jobs = [make_job(index, "x", seed=5, num_frames=1, steps=3, output=f"{index}.mp4") for index in range(2)]
    ran = run_jobs(folder, tmp_path, jobs, plan=make_plan(folder, batch_size=1))
    assert (ran.floats[jobs[0].key] == ran.floats[jobs[1].key]).all()


def test_pitfall_15_rows_of_different_calls_are_padded_with_zeros_to_the_longest() -> None:
    short, long = torch.ones(1, 2, 3), torch.ones(1, 4, 3)
    joined = join_rows([short, long], CPU)
    assert joined.shape == (2, 4, 3)
    assert joined[0, 2:].abs().sum() == 0
    mask = join_rows([torch.ones(1, 2, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)], CPU)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    embeds = [torch.ones(2, 3), torch.ones(4, 3)]
    assert join_rows([Item(embeds[0]), Item(embeds[1])], CPU) == embeds


def test_pitfall_15_a_batch_splits_into_rows_and_shared_values() -> None:
    batch = torch.arange(6).view(3, 2)
    assert [row.tolist() for row in split_rows(batch, 3)] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert split_rows([1, 2, 3], 3) == [Item(1), Item(2), Item(3)]
    assert split_rows(torch.float32, 3) == [torch.float32] * 3
    assert split_rows(7, 2) == [7, 7]


@pytest.mark.parametrize("family", ["qwen_image", "sdxl", "wan22", "ltx2"])
def test_pitfall_22_a_watched_forward_keeps_its_signature(family: str, tiny_folder: TinyFolder) -> None:
    folder = ModelFolder.read(tiny_folder(family))
    name = "unet" if "unet" in folder.entries else "transformer"
    module = folder.load_model(name, torch.float32)
    before = inspect.signature(module.forward)
    Meter(CPU).watch(name, module)
    assert inspect.signature(module.forward) == before


def test_pitfall_23_a_vae_is_counted_by_its_own_entries(tiny_folder: TinyFolder) -> None:
    vae = ModelFolder.read(tiny_folder("z_image")).load_model("vae", torch.float32)
    meter = Meter(CPU)
    meter.watch("vae", vae)
    with torch.no_grad():
        latents = vae.encode(torch.zeros(1, 3, 64, 64)).latent_dist.mode()
        vae.decode(latents)
    ((name, calls, seconds),) = meter.take()
    assert (name, calls) == ("vae", 2)
    assert seconds > 0
    assert meter.take() == ()


def test_pitfall_24b_a_stages_device_is_said_outright(tiny_folder: TinyFolder) -> None:
    read = ModelFolder.read(tiny_folder("sdxl"))
    device = torch.device("cuda:0")
    stages = build_stages(read, device, dict.fromkeys(read.models, torch.float32))
    assert {stage.pipe._execution_device for stage in stages.stages} == {device}


def test_pitfall_27_the_experts_swap_once_a_batch(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("wan22")
    jobs = [make_job(index, "x", num_frames=1, output=f"{index}.mp4") for index in range(2)]
    modes = {"transformer": "component-offload", "transformer_2": "component-offload"}
    ran = run_jobs(folder, tmp_path, jobs, plan=make_plan(folder, batch_size=1, modes=modes))
    assert ran.failed == []
    moves = [(event.component, event.direction) for event in ran.of(ComponentMoved) if event.component.startswith("transformer")]
    swap = [("transformer", "in"), ("transformer", "out"), ("transformer_2", "in"), ("transformer_2", "out")]
    assert moves == swap * 2


@pytest.mark.parametrize(
    ("ratio", "steps", "loaded"),
    [(0.875, 1, ["transformer"]), (1.1, 3, ["transformer_2"]), (0.875, 3, ["transformer", "transformer_2"])],
    ids=["all noisy", "all clean", "both"],
)
def test_pitfall_27_an_expert_that_no_timestep_reaches_is_not_loaded(
    ratio: float, steps: int, loaded: list[str], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("wan22"), folder, copy_function=os.link)
    index = folder / "model_index.json"
    settings = json.loads(index.read_text()) | {"boundary_ratio": ratio}
    index.unlink()
    index.write_text(json.dumps(settings))
    job = make_job(0, "x", num_frames=1, steps=steps, output="0.mp4")
    ran = run_jobs(folder, tmp_path / "run", [job])
    assert ran.failed == []
    assert [event.component for event in ran.of(ComponentLoaded) if event.component.startswith("transformer")] == loaded
    told = [event.subject for event in ran.of(DecisionMade) if event.rule == "expert"]
    assert told == sorted({"transformer", "transformer_2"} - set(loaded))
    theirs = call_by_hand(load_ordinary(folder), job)
    assert (ran.floats[job.key] == theirs).all()


def test_pitfall_27_an_expert_is_loaded_when_a_later_job_reaches_it(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    jobs = [make_job(index, "x", num_frames=1, steps=steps, output=f"{index}.mp4") for index, steps in enumerate((1, 3, 1))]
    ran = run_jobs(tiny_folder("wan22"), tmp_path, jobs, windows=3)
    assert ran.failed == []
    loaded = [event for event in ran.events if isinstance(event, ComponentLoaded) and event.component == "transformer_2"]
    assert len(loaded) == 1
    assert ran.events.index(loaded[0]) > ran.events.index(ran.done[0])
    assert (ran.floats[jobs[0].key] != ran.floats[jobs[2].key]).any()  # seeds differ; both came through
