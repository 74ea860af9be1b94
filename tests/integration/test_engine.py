"""What the engine promises for a window: one end for every job, one read of every weight, one encode of every text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from batchgen.errors import ModelError, RunStoppedError
from batchgen.events import (
    ComponentLoaded,
    DecisionMade,
    Event,
    JobFailed,
    LatentsSpooled,
    OutputDone,
    StageBatchDone,
    WorkerReady,
)
from batchgen.execute import stages as stages_module
from batchgen.execute.families import Family
from batchgen.execute.load import ModelFolder
from batchgen.execute.settings import Window
from batchgen.execute.windows import Row
from batchgen.outputs.metadata import read_settings
from conftest import TinyFolder
from enginekit import Ran, engine_for, make_job, make_plan, run_jobs


def texts(count: int, **fields: Any) -> list[Any]:
    return [make_job(index, f"a red circle number {index}", steps=2, **fields) for index in range(count)]


def ended(ran: Ran) -> list[str]:
    return sorted(event.key for event in ran.events if isinstance(event, (OutputDone, JobFailed)))


def test_files_hold_what_was_handed_to_the_writer_and_how_it_was_made(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    jobs = texts(3, negative_prompt="blurry", guidance=3.0)
    ran = run_jobs(tiny_folder("qwen_image"), tmp_path, jobs)
    assert len(ran.done) == 3
    for job in jobs:
        path = tmp_path / "outputs" / job.output
        pixels = np.asarray(Image.open(path))
        assert (pixels == (ran.floats[job.key] * 255).round().astype(np.uint8)).all()
        told = read_settings(path)
        assert told is not None
        wanted = (job.key, job.prompt, "blurry", job.seed, 64, 64, 2, 3.0, "tiny", "0", 3)
        names = ("key", "prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "model", "revision", "batch")
        assert tuple(told[name] for name in names) == wanted


def test_values_left_to_the_model_are_written_as_they_came_out(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    job = make_job(0, "a red circle", steps=None)
    engine = engine_for(tiny_folder("pixart_sigma"), tmp_path, ran := Ran())
    engine.run_window(Window(0, (job,)))
    assert ran.failed == []
    told = read_settings(tmp_path / "outputs" / job.output)
    assert told is not None
    assert (told["steps"], told["guidance"]) == (20, 4.5)  # PixArtSigmaPipeline's own defaults


def test_every_component_is_loaded_once_over_windows_and_kinds_of_jobs(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers
    import transformers

    calls: list[tuple[str, str]] = []
    for base in (diffusers.ModelMixin, transformers.PreTrainedModel):
        original = base.from_pretrained.__func__

        def counted(cls: type, path: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            calls.append((cls.__name__, kwargs["subfolder"]))
            return original(cls, path, *args, **kwargs)

        monkeypatch.setattr(base, "from_pretrained", classmethod(counted))
    folder = tiny_folder("z_image")
    picture = tmp_path / "in.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    jobs = [*texts(3), make_job(3, "x", image=str(picture), strength=0.9)]
    ran = run_jobs(folder, tmp_path / "run", jobs, windows=2)
    assert ran.failed == []
    assert sorted(subfolder for _, subfolder in calls) == ["text_encoder", "transformer", "vae"]
    files = [file for event in ran.of(ComponentLoaded) for file in event.files]
    assert sorted(files) == sorted(str(file.relative_to(folder)) for file in folder.rglob("*.safetensors"))


def test_equal_texts_are_encoded_once_over_the_whole_run(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    prompts = ["one", "two", "one", "three", "two", "one"]
    jobs = [make_job(index, prompt, negative_prompt="blurry", guidance=3.0, steps=2) for index, prompt in enumerate(prompts)]
    ran = Ran()
    engine = engine_for(tiny_folder("qwen_image"), tmp_path, ran, plan=make_plan(tiny_folder("qwen_image")))
    rows: list[int] = []
    engine.components.ensure(["text_encoder"])
    engine.components.modules["text_encoder"].register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    engine.run_window(Window(0, tuple(jobs[:3])))
    engine.run_window(Window(1, tuple(jobs[3:])))
    assert len(ran.done) == 6
    assert sum(rows) == 3 + 1  # three prompts and the one negative


def test_the_negative_prompt_most_rows_share_costs_one_row(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    jobs = [make_job(index, f"prompt {index}", negative_prompt="blurry", steps=2) for index in range(8)]
    ran = run_jobs(tiny_folder("z_image"), tmp_path, jobs)
    encodes = [(event.size, {name: calls for name, calls, _ in event.compute}) for event in ran.of(StageBatchDone)
               if event.stage == "text_encoder"]
    assert encodes == [(1, {"text_encoder": 2}), (7, {"text_encoder": 1})]


@pytest.mark.parametrize("family", ["qwen_image", "sdxl", "wan22_i2v"])
def test_no_component_is_called_outside_its_stage(family: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    picture = tmp_path / "in.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    more = {"image": str(picture), "num_frames": 5} if family.startswith("wan") else {}
    jobs = [make_job(index, "x", output=f"{index}.{'mp4' if more else 'png'}", **more) for index in range(2)]
    ran = run_jobs(tiny_folder(family), tmp_path / "run", jobs)
    assert ran.failed == []
    owned = dict(ran.of(WorkerReady)[0].stage_components)
    if more:
        owned["vae_encoder"] = ("vae",)
    called = [(event.stage, {name for name, calls, _ in event.compute if calls}) for event in ran.of(StageBatchDone)]
    assert called
    assert all(names <= set(owned[stage]) for stage, names in called)
    assert {stage for stage, _ in called} == {stage for stage, _ in ran.of(WorkerReady)[0].stage_components} | set(owned)


def test_a_row_that_breaks_its_batch_fails_alone(tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = texts(4)
    original = Row.generator_now

    def broken(row: Row) -> torch.Generator:
        if row.job.index == 2:
            raise RuntimeError("this row's noise is broken")
        return original(row)

    monkeypatch.setattr(Row, "generator_now", broken)
    ran = run_jobs(tiny_folder("qwen_image"), tmp_path, jobs)
    (failed,) = ran.failed
    assert (failed.key, failed.kind, failed.stage) == (jobs[2].key, "error", "denoise")
    assert "noise is broken" in failed.reason
    assert ended(ran) == sorted(job.key for job in jobs)


def test_a_text_that_breaks_the_encoder_fails_only_the_jobs_that_need_it(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    jobs = [make_job(0, "good", steps=2), make_job(1, "bad", steps=2), make_job(2, "good", steps=2), make_job(3, "bad", steps=2)]
    ran = Ran()
    engine = engine_for(tiny_folder("qwen_image"), tmp_path, ran)
    stages, _ = engine.road(())
    pipe = stages.named("text_encoder").pipe
    tokenizer = pipe.tokenizer

    def refusing(texts: Any, *args: Any, **kwargs: Any) -> Any:
        if any("bad" in text for text in texts):
            raise ValueError("cannot tokenize this")
        return tokenizer(texts, *args, **kwargs)

    pipe.tokenizer = refusing
    engine.run_window(Window(0, tuple(jobs)))
    assert [(event.key, event.stage) for event in ran.failed] == [(jobs[1].key, "text_encoder"), (jobs[3].key, "text_encoder")]
    assert {event.key for event in ran.done} == {jobs[0].key, jobs[2].key}


def test_latents_that_are_no_numbers_fail_their_row(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    jobs = texts(3)
    ran = Ran()
    engine = engine_for(tiny_folder("qwen_image"), tmp_path, ran)
    engine.components.ensure(["transformer"])

    def poison(module: Any, args: Any, output: Any) -> Any:
        output[0][1] = float("nan")
        return output

    engine.components.modules["transformer"].register_forward_hook(poison)
    engine.run_window(Window(0, tuple(jobs)))
    assert [(event.key, event.kind, event.stage) for event in ran.failed] == [(jobs[1].key, "non-finite", "denoise")]
    assert {event.key for event in ran.done} == {jobs[0].key, jobs[2].key}


def test_a_picture_that_is_no_numbers_fails_and_a_flat_one_is_flagged(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    ran = Ran()
    engine = engine_for(tiny_folder("z_image"), tmp_path, ran)
    engine.components.ensure(["vae"])
    last = engine.components.modules["vae"].decoder.conv_out
    last.weight = torch.nn.Parameter(torch.zeros_like(last.weight), requires_grad=False)
    last.bias = torch.nn.Parameter(torch.zeros_like(last.bias), requires_grad=False)
    engine.run_window(Window(0, (make_job(0, "x", steps=2),)))
    assert [event.flags for event in ran.done] == [("flat",)]
    last.bias.fill_(float("nan"))
    engine.run_window(Window(1, (make_job(1, "y", steps=2),)))
    assert [(event.kind, event.stage) for event in ran.failed] == [("non-finite", "decode")]
    assert not (tmp_path / "outputs" / "001.png").exists()


def test_a_filtered_picture_is_told_apart_and_not_written(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    jobs = [make_job(0, "fine", steps=2), make_job(1, "not fine", steps=2)]
    ran = Ran()
    engine = engine_for(tiny_folder("lumina2"), tmp_path, ran)
    stage = engine.road(())[0].named("pipeline")
    engine.components.ensure(stage.components)
    pipe = stage.pipe
    stage.pipe = lambda **kwargs: pipe(**kwargs) | {"nsfw": [False, True]}  # as pipelines with a safety checker say it
    engine.run_window(Window(0, tuple(jobs)))
    assert [(event.key, event.kind) for event in ran.failed] == [(jobs[1].key, "filtered")]
    assert [event.key for event in ran.done] == [jobs[0].key]
    assert not (tmp_path / "outputs" / "001.png").exists()


def test_a_stop_finishes_the_batch_in_flight_and_its_latents_are_decoded_later(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("qwen_image")
    jobs = texts(4)
    whole = run_jobs(folder, tmp_path / "whole", jobs, plan=make_plan(folder, batch_size=2))
    first = Ran()
    engine = engine_for(folder, tmp_path / "run", first, plan=make_plan(folder, batch_size=2))

    def stop(event: Event) -> None:
        first.events.append(event)
        if isinstance(event, StageBatchDone) and event.stage == "denoise":
            engine.finish_current_batch()

    engine = engine_for(folder, tmp_path / "run", first, plan=make_plan(folder, batch_size=2), emit=stop)
    engine.run_window(Window(0, tuple(jobs)))
    (spooled,) = first.of(LatentsSpooled)
    assert spooled.keys == (jobs[0].key, jobs[1].key)
    assert ended(first) == []

    again = Ran()
    engine = engine_for(folder, tmp_path / "run", again, plan=make_plan(folder, batch_size=2))
    engine.run_window(Window(0, tuple(jobs), spooled=tuple((key, spooled.path) for key in spooled.keys)))
    denoised = {key for event in again.of(StageBatchDone) if event.stage == "denoise" for key in event.keys}
    assert denoised == {jobs[2].key, jobs[3].key}
    assert ended(again) == sorted(job.key for job in jobs)
    for job in jobs:
        ours, theirs = (np.asarray(Image.open(tmp_path / run / "outputs" / job.output)) for run in ("run", "whole"))
        assert (ours == theirs).all()
    assert whole.failed == []


def test_a_broken_spool_file_only_costs_denoising_again(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "half.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    jobs = texts(2)
    ran = Ran()
    engine = engine_for(tiny_folder("qwen_image"), tmp_path, ran)
    engine.run_window(Window(0, tuple(jobs), spooled=((jobs[0].key, "spool/half.safetensors"), (jobs[1].key, "spool/gone.safetensors"))))
    assert len(ran.done) == 2


def test_pitfall_02_the_run_stops_where_the_model_makes_another_size_than_asked(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pitfall 2: these blocks take this model for one of another scale
    monkeypatch.setattr(stages_module, "find_family", lambda *_: Family("WanPipeline", "WanBlocks"))
    engine = engine_for(tiny_folder("wan22_ti2v"), tmp_path, ran := Ran())
    with pytest.raises(RunStoppedError, match=r"height 64 was asked for, 128 came out"):
        engine.run_window(Window(0, (make_job(0, "x", num_frames=5, output="0.mp4"),)))
    assert ran.done == []


def test_weights_that_do_not_load_stop_the_run_by_name(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("z_image"), folder)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    engine = engine_for(folder, tmp_path / "run", Ran())
    with pytest.raises(ModelError, match="vae does not load"):
        engine.run_window(Window(0, (make_job(0, "x", steps=2),)))


Damage = Callable[[Path], object]


def setting(file: str, name: str, value: object) -> Damage:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return change


@pytest.mark.parametrize(
    ("component", "harm"),
    [
        ("transformer", setting("transformer/config.json", "dim", "wide")),
        ("transformer", setting("transformer/config.json", "axes_dims", [2, 2])),
        ("transformer", lambda folder: (folder / "transformer/config.json").write_text("{}")),
        ("vae", setting("vae/config.json", "block_out_channels", [])),
        ("text_encoder", setting("text_encoder/config.json", "num_attention_heads", 0)),
        ("scheduler", setting("scheduler/scheduler_config.json", "num_train_timesteps", None)),
        ("tokenizer", lambda folder: (folder / "tokenizer/tokenizer.json").write_text('{"a"')),
        ("tokenizer", lambda folder: (folder / "tokenizer/tokenizer.json").unlink()),
    ],
    ids=["a text for a width", "sizes that do not add up", "an empty config", "no levels", "no heads", "no steps", "half a file", "no vocabulary"],
)
def test_a_component_that_cannot_be_made_of_its_files_refuses_the_run_by_name(
    component: str, harm: Damage, tiny_folder: TinyFolder, tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("z_image"), folder)
    harm(folder)
    with pytest.raises(ModelError, match=rf"model: {component} ") as caught:
        engine_for(folder, tmp_path / "run", Ran()).run_window(Window(0, (make_job(0, "x", steps=2),)))
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_jobs_the_model_cannot_take_fail_with_the_reason(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    picture = tmp_path / "in.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    jobs = [make_job(0, "x", steps=2), make_job(1, "y", steps=2, image=str(picture))]
    ran = run_jobs(tiny_folder("lumina2"), tmp_path, jobs)
    assert [(event.key, event.kind, event.reason) for event in ran.failed] == [(jobs[1].key, "input", "Lumina2Pipeline takes no image")]
    assert [event.key for event in ran.done] == [jobs[0].key]


def test_a_second_branch_beside_an_embedded_scale_takes_the_ordinary_call(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    from enginekit import call_by_hand, load_ordinary

    folder = tiny_folder("flux")
    jobs = [make_job(0, "x", steps=2), make_job(1, "y", negative_prompt="z", true_cfg_scale=3.0, guidance=2.0, steps=2)]
    ran = run_jobs(folder, tmp_path, jobs)
    assert ran.failed == []
    pipe = load_ordinary(folder)
    assert (call_by_hand(pipe, jobs[0]) == ran.floats[jobs[0].key]).all()
    assert (call_by_hand(pipe, jobs[1], true_cfg_scale=3.0, guidance_scale=2.0) == ran.floats[jobs[1].key]).all()


def test_pitfall_17_a_stage_that_cannot_batch_is_learned_once(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    # pitfall 17: this VAE's attention mask fits one clip only
    folder = tiny_folder("hunyuan_video15")
    jobs = [make_job(index, "x", num_frames=1, steps=2, output=f"{index}.mp4") for index in range(4)]
    ran = run_jobs(folder, tmp_path, jobs, plan=make_plan(folder, batch_size=2))
    assert len(ran.done) == 4
    assert [event.subject for event in ran.of(DecisionMade)] == ["decode"]
    assert [event.size for event in ran.of(StageBatchDone) if event.stage == "denoise"] == [2, 2]


def test_a_run_in_which_nothing_can_come_out_stops(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    ran = Ran()
    engine = engine_for(tiny_folder("qwen_image"), tmp_path, ran)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no tokenizer today")

    engine.road(())[0].named("text_encoder").pipe.tokenizer = refusing
    with pytest.raises(RunStoppedError, match="the first 25 jobs all failed, the last of them in text_encoder: ValueError: no tokenizer today"):
        engine.run_window(Window(0, tuple(texts(30))))
    assert len(ran.failed) == 25


def test_many_failures_after_a_product_do_not_stop_the_run(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    ran = Ran()
    engine = engine_for(tiny_folder("qwen_image"), tmp_path, ran)
    engine.run_window(Window(0, (make_job(99, "fine", steps=1),)))

    def refusing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no tokenizer today")

    engine.road(())[0].named("text_encoder").pipe.tokenizer = refusing
    engine.run_window(Window(1, tuple(texts(30))))
    assert (len(ran.done), len(ran.failed)) == (1, 30)


def test_an_encoder_that_gives_every_text_the_same_stops_the_run(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    ran = Ran()
    engine = engine_for(tiny_folder("sdxl"), tmp_path, ran)
    engine.components.ensure(["text_encoder", "text_encoder_2"])
    for name in ("text_encoder", "text_encoder_2"):
        engine.components.modules[name].get_input_embeddings().weight.data.zero_()
    with pytest.raises(RunStoppedError, match="gives the same for different texts"):
        engine.run_window(Window(0, tuple(make_job(index, text, steps=1) for index, text in enumerate(("red", "green", "blue")))))
    assert ended(ran) == []


def test_a_matrix_of_zeros_that_its_file_does_not_have_is_an_error(tiny_folder: TinyFolder) -> None:
    folder = ModelFolder.read(tiny_folder("z_image"))
    module = folder.load_model("text_encoder", torch.float32)
    folder._check_zeros("text_encoder", module)
    module.get_input_embeddings().weight.data.zero_()
    with pytest.raises(ModelError, match=r"text_encoder: embed_tokens\.weight is all zeros, and not so in its file"):
        folder._check_zeros("text_encoder", module)


def test_a_broken_device_ends_the_worker_not_the_jobs(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    ran = Ran()
    engine = engine_for(tiny_folder("qwen_image"), tmp_path, ran)
    engine.components.ensure(["transformer"])

    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.components.modules["transformer"].register_forward_pre_hook(lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.run_window(Window(0, tuple(texts(2))))
    assert ended(ran) == []
