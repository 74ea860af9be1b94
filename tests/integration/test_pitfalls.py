"""What was found when the model families were taken apart: a test for each pitfall, with its number in the list of pitfalls.

Here, and where the part that it concerns is tested: 2 and 17 also in test_engine.py, 12 in unit/execute/test_guidance.py, 19 and 20 in
test_hollow_pictures.py, test_hollow_videos.py and test_rehearsal.py, 24 and 25 in unit/execute/test_moving.py. Most are held by every row of the table in test_families.py as well.
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

import tiny
from batchgen.errors import ModelError
from batchgen.events import ComponentLoaded, ComponentMoved, DecisionMade, StageBatchDone, WorkerReady
from batchgen.execute.families import find_family
from batchgen.execute.hollow_model import hollow_rehearsal
from batchgen.execute.load import ModelFolder, check_loaded
from batchgen.execute.memory import HostBudget
from batchgen.execute.meter import Meter
from batchgen.execute.moving import AbsentWeightError
from batchgen.execute.residency import Residency
from batchgen.execute.settings import Window
from batchgen.execute.stages import Item, Stages, build_stages, join_rows, split_rows
from batchgen.execute.windows import EncodedCache
from batchgen.rehearsal.hollow import weight_bytes as hollow_bytes
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


def test_pitfall_02_a_timestep_for_every_token_takes_the_ordinary_call(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    ran = run_jobs(tiny_folder("wan22_ti2v"), tmp_path, [make_job(0, "x", num_frames=5, steps=1, output="0.mp4")])
    assert [event.road for event in ran.of(WorkerReady)] == ["pipeline"]
    assert next(iter(ran.floats.values())).shape == (5, 64, 64, 3)


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


@pytest.mark.parametrize("family", ["wan21", "z_image", "ltx"])
def test_pitfall_08_in_bfloat16_a_picture_does_not_depend_on_the_placement(family: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    # these stages round the timestep where the ordinary call does not: they are only held against themselves
    folder = tiny_folder(family)
    job = make_job(0, "x", steps=2, output="0.png") if family == "z_image" else make_job(0, "x", num_frames=9, steps=2, output="0.mp4")
    modes = dict.fromkeys(ModelFolder.read(folder).models, "layerwise-offload")
    resident = run_jobs(folder, tmp_path / "resident", [job], dtype="bfloat16", plan=make_plan(folder, batch_size=1))
    streamed = run_jobs(folder, tmp_path / "streamed", [job], dtype="bfloat16", plan=make_plan(folder, batch_size=1, modes=modes))
    assert resident.failed == streamed.failed == []
    assert (resident.floats[job.key] == streamed.floats[job.key]).all()


def test_pitfall_09_nothing_is_printed(tiny_folder: TinyFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder("wan21")
    capfd.readouterr()
    ran = run_jobs(folder, tmp_path, [make_job(0, "x", num_frames=5, steps=2, output="0.mp4")])
    assert ran.failed == []
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.parametrize(
    ("family", "scales"),
    [("qwen_image", {"guider": 3.0}), ("wan22", {"guider": 3.0, "guider_2": 3.0}), ("ltx2", {"guider": 3.0, "audio_guider": 7.0})],
)
def test_pitfall_10_a_rows_guidance_reaches_every_guider_that_follows_it(
    family: str, scales: dict[str, float], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    stages, rules = engine_for(tiny_folder(family), tmp_path, Ran()).road(())
    row = rules.of(make_job(0, "x", guidance=3.0, negative_prompt="blurry"))
    assert {name: guider.config["guidance_scale"] for name, guider in rules.guiders_for([row]).items()} == scales
    text = stages.encoders[0]
    for name in text.guiders:  # the text stage's own is on whatever the row says: its negatives are wanted
        assert rules.text_guider(getattr(text.pipe, name), negatives=True)._is_cfg_enabled()


@pytest.mark.parametrize(("family", "off"), [("sdxl", 1.0), ("ltx", 1.0), ("wan21", 1.0), ("z_image", 0.0)])
def test_pitfall_11_guidance_is_off_at_the_familys_neutral_scale_and_never_disabled(
    family: str, off: float, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    _, rules = engine_for(tiny_folder(family), tmp_path, Ran()).road(())
    row = rules.of(make_job(0, "x", guidance=off, negative_prompt="blurry"))
    assert (row.on, row.scale) == (False, off)
    guider = rules.guiders_for([row])["guider"]
    assert guider.config["guidance_scale"] == off
    assert guider._enabled
    assert rules.of(make_job(0, "x", guidance=off + 0.5, negative_prompt="blurry")).on


def test_pitfall_13_a_schedulers_state_does_not_pass_to_the_next_batch(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("wan21")  # UniPC keeps its last model outputs
    jobs = [make_job(index, "x", seed=5, num_frames=1, steps=3, output=f"{index}.mp4") for index in range(2)]
    ran = run_jobs(folder, tmp_path, jobs, plan=make_plan(folder, batch_size=1))
    assert (ran.floats[jobs[0].key] == ran.floats[jobs[1].key]).all()


@pytest.mark.parametrize("family", ["z_image", "qwen_image"])  # lists of embeddings; masks
def test_pitfall_14_prompts_of_different_length_share_a_batch_unchanged(family: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder(family)
    jobs = [make_job(0, "x", steps=2), make_job(1, "a small green square " * 20, steps=2)]
    alone = run_jobs(folder, tmp_path / "alone", jobs, plan=make_plan(folder, batch_size=1))
    together = run_jobs(folder, tmp_path / "together", jobs, plan=make_plan(folder, batch_size=2))
    assert max(event.size for event in together.of(StageBatchDone) if event.stage == "denoise") == 2
    for job in jobs:  # never compared by hash: another batch size is other kernels
        assert np.abs(alone.floats[job.key] - together.floats[job.key]).max() <= 1e-5


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


def test_pitfall_16_encoders_of_pictures_take_one_and_the_denoiser_many(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    jobs = []
    for index, colour in enumerate(("red", "blue")):
        path = tmp_path / f"{colour}.png"
        Image.new("RGB", (64, 64), colour).save(path)
        jobs.append(make_job(index, "x", image=str(path), num_frames=5, steps=1, output=f"{index}.mp4"))
    folder = tiny_folder("wan21_i2v")
    ran = run_jobs(folder, tmp_path / "run", jobs, plan=make_plan(folder, batch_size=2))
    assert ran.failed == []
    sizes = [(event.stage, event.size) for event in ran.of(StageBatchDone) if event.stage != "text_encoder"]
    assert sizes == [("image_encoder", 1)] * 2 + [("vae_encoder", 1)] * 2 + [("denoise", 2), ("decode", 2)]


def test_pitfall_18_a_decode_that_draws_noise_goes_on_where_the_denoiser_stopped(tmp_path: Path) -> None:
    tiny.ltx(tmp_path / "model", timestep_conditioning=True)
    jobs = [make_job(index, "x", num_frames=9, steps=1, output=f"{index}.mp4") for index in range(2)]
    ran = run_jobs(tmp_path / "model", tmp_path / "run", jobs, plan=make_plan(tmp_path / "model", batch_size=2))
    assert ran.failed == []
    pipe = load_ordinary(tmp_path / "model")
    for job in jobs:
        assert np.abs(call_by_hand(pipe, job) - ran.floats[job.key]).max() <= 1e-5


def test_pitfall_21_a_component_whose_initialisers_look_at_their_weights_is_made_hollow(tiny_folder: TinyFolder) -> None:
    read = ModelFolder.read(tiny_folder("ltx2"))  # Gemma3's read the values that they have just drawn
    made = hollow_rehearsal(str(read.path), dict.fromkeys(read.models, "float32")).components["text_encoder"]
    loaded = read.load_model("text_encoder", torch.float32)
    assert hollow_bytes(made) == hollow_bytes(loaded)


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


def test_pitfall_26_a_vae_that_is_out_comes_back_for_its_stage_and_raises_by_name_outside_it(tiny_folder: TinyFolder) -> None:
    vae = ModelFolder.read(tiny_folder("flux2_klein")).load_model("vae", torch.float32)
    latents = torch.zeros(1, 4, 8, 8)
    residency = Residency({"vae": "component-offload"}, CPU, host_budget=HostBudget.find(None), emit=lambda _: None)
    residency.add("vae", vae)
    with residency.stage(["vae"]), torch.no_grad():
        inside = vae.decode(latents).sample  # entered by decode, not forward
    assert torch.isfinite(inside).all()
    with pytest.raises(AbsentWeightError, match=r"vae\.\S+ is not on cpu"), torch.no_grad():
        vae.decode(latents)


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
