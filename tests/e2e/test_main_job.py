"""The main job: a list becomes pictures, the same ones that the ordinary pipeline gives when called by hand."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import Said, batchgen, events, forty_rows, pixels, run_json, start, texts, write_csv

GUIDANCE = 4.0  # of the Qwen-Image profile
METADATA = {"prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "model", "revision", "batchgen_version"}


def expected(rows: list[dict[str, str]]) -> list[tuple[dict[str, str], int]]:
    """(row, seed) of every picture, in order."""
    return [(row, int(row["seed"]) + k) for row in rows for k in range(int(row["num_images"] or 1))]


def by_hand(folder: Path, rows: list[dict[str, str]], **fixed: Any) -> list[np.ndarray]:
    """The ordinary diffusers pipeline, a call a picture. uint8 [H, W, 3]."""
    import diffusers
    import torch

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    found = []
    for row, seed in expected(rows):
        negative = {"negative_prompt": row["negative_prompt"]} if row["negative_prompt"] else {}
        image = pipe(
            prompt=row["prompt"], width=int(row["width"]), height=int(row["height"]), num_inference_steps=int(row["steps"]),
            generator=torch.Generator("cpu").manual_seed(seed), **negative, **fixed,
        ).images[0]
        found.append(np.asarray(image.convert("RGB")))
    return found


def table(run: Path) -> list[dict[str, str]]:
    with (run / "tables" / "jobs.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def list_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_csv(tmp_path_factory.mktemp("list") / "prompts.csv", forty_rows())


@pytest.fixture(scope="module")
def reference(qwen_folder: Path) -> list[np.ndarray]:
    return by_hand(qwen_folder, forty_rows(), true_cfg_scale=GUIDANCE)


@pytest.fixture(scope="module")
def singly(tmp_path_factory: pytest.TempPathFactory, list_file: Path, qwen_folder: Path) -> Path:
    """The run folder of the whole list at batch 1, with its events beside it."""
    here = tmp_path_factory.mktemp("singly")
    said = batchgen("run", list_file, "--model", qwen_folder, "-o", "run", "--batch-size", 1, "--events", "events.jsonl", folder=here)
    assert said.code == 0, said
    return here / "run"


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory, list_file: Path, qwen_folder: Path) -> tuple[Path, Said]:
    """The run folder of the whole list in auto batches, and what the process said: a line on stderr for each module it imported."""
    here = tmp_path_factory.mktemp("batched")
    said = batchgen("run", list_file, "--model", qwen_folder, "-o", "run", folder=here, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert said.code == 0, said
    return here / "run", said


def pictures(run: Path) -> list[np.ndarray]:
    return [pixels(run / "outputs" / row["output"]) for row in table(run)]


def test_at_batch_1_every_picture_is_the_hand_called_pipelines_own(singly: Path, reference: list[np.ndarray]) -> None:
    found = pictures(singly)
    assert len(found) == len(reference) == 44
    assert len(list((singly / "outputs").rglob("*.png"))) == 44
    different = [number for number, (mine, theirs) in enumerate(zip(found, reference, strict=True)) if not np.array_equal(mine, theirs)]
    assert different == []


def test_in_auto_batches_a_picture_is_at_most_a_grey_level_away(
    batched: tuple[Path, Said], reference: list[np.ndarray],
) -> None:
    found = pictures(batched[0])
    assert max(int(row["batch"]) for row in table(batched[0])) > 1
    distances = [int(np.abs(mine.astype(int) - theirs.astype(int)).max()) for mine, theirs in zip(found, reference, strict=True)]
    assert max(distances) <= 1


def test_the_process_that_hands_out_the_work_never_imports_torch(batched: tuple[Path, Said]) -> None:
    imported = {line.rsplit("|", 1)[1].strip() for line in batched[1].err.splitlines() if line.startswith("import time:")}
    assert "batchgen.execute.supervisor" in imported
    assert imported & {"torch", "diffusers", "transformers", "accelerate"} == set()


def test_every_picture_says_how_it_was_made(singly: Path, qwen_folder: Path) -> None:
    revision = run_json(singly)["model"]["revision"]
    for row, (asked, seed) in zip(table(singly), expected(forty_rows()), strict=True):
        said = texts(singly / "outputs" / row["output"])
        assert set(said) >= METADATA
        assert (said["prompt"], said["negative_prompt"], said["seed"]) == (asked["prompt"], asked["negative_prompt"], str(seed))
        assert (said["width"], said["height"], said["steps"]) == (asked["width"], asked["height"], asked["steps"])
        assert (float(said["guidance"]), said["model"], said["revision"]) == (GUIDANCE, str(qwen_folder), revision)


def test_the_run_folder_holds_what_the_documents_promise(singly: Path) -> None:
    for name in ("run.json", "journal.sqlite", "tables/residency.txt", "tables/timings.txt", "tables/jobs.csv"):
        assert (singly / name).stat().st_size > 0
    record = run_json(singly)
    assert record["settings"]["batch-size"] == {"value": 1, "source": "command line"}
    assert record["settings"]["performance-mode"]["source"] == "built-in"
    assert set(record["plan"]["placements"]) == {"text_encoder", "transformer", "vae"}
    assert {"torch", "diffusers", "transformers", "python"} <= set(record["versions"])
    timings = (singly / "tables" / "timings.txt").read_text(encoding="utf-8")
    assert all(word in timings for word in ("text_encoder", "transformer", "vae", "denoise", "decode", "44 done"))


def test_weights_are_read_once_and_equal_prompts_encoded_once(singly: Path) -> None:
    log = singly.parent / "events.jsonl"
    assert Counter(event["component"] for event in events(log, "ComponentLoaded")) == {"text_encoder": 1, "transformer": 1, "vae": 1}
    files = [file for event in events(log, "ComponentLoaded") for file in event["files"]]
    assert len(files) == len(set(files)) > 0
    texts_of_list = {row["prompt"] for row in forty_rows()} | {"blurry", ""}  # "": the negative of rows that name none
    encoded = [event for event in events(log, "StageBatchDone") if event["stage"] == "text_encoder"]
    calls = sum(count for event in encoded for name, count, _ in event["compute"] if name == "text_encoder")
    assert calls <= len(texts_of_list)


def test_no_component_is_called_outside_its_stage(singly: Path) -> None:
    called: dict[str, set[str]] = {}
    for event in events(singly.parent / "events.jsonl", "StageBatchDone"):
        called.setdefault(event["stage"], set()).update(name for name, count, _ in event["compute"] if count)
    assert called == {"text_encoder": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}}


def test_a_second_run_renders_nothing_and_says_so(singly: Path, list_file: Path, qwen_folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (singly / "outputs").rglob("*.png")}
    said = batchgen("run", list_file, "--model", qwen_folder, "-o", "run", "--batch-size", 1, folder=singly.parent)
    assert said.code == 0, said
    assert "44/44 done" in said.err
    assert {path: path.stat().st_mtime_ns for path in (singly / "outputs").rglob("*.png")} == before


@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_at_a_random_moment_costs_nothing(
    attempt: int, tmp_path: Path, list_file: Path, qwen_folder: Path, reference: list[np.ndarray],
) -> None:
    log, run = tmp_path / "events.jsonl", tmp_path / "run"
    arguments = ["run", list_file, "--model", qwen_folder, "-o", run, "--batch-size", 1, "--events", log]
    target = random.Random(attempt).randrange(1, 120)  # lines of the log: loads, batches and pictures alike
    process = start(arguments, tmp_path)
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < target):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for_end(events(log, "WorkerReady"))
    standing = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (run / "outputs").rglob("*.png")}
    assert all(pixels(path).size for path in standing)  # whole ones only, under their final names
    assert len(standing) < 44
    said = batchgen(*arguments, folder=tmp_path)
    assert said.code == 0, said
    assert "44/44 done" in said.err
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in standing} == standing
    assert len(list((run / "outputs").rglob("*"))) == 44
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(pictures(run), reference, strict=True))


def wait_for_end(ready: list[dict[str, Any]]) -> None:
    """A worker ends by itself when its supervisor is gone."""
    deadline = time.monotonic() + 60
    for event in ready:
        while Path(f"/proc/{event['pid']}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{event['pid']}").exists(), "the worker outlives its supervisor"


def test_a_log_without_a_terminal_is_plain_and_grows_with_batches_alone(singly: Path, tmp_path: Path, qwen_folder: Path) -> None:
    rows = [{**row, "steps": "12"} for row in forty_rows()[:20]]
    write_csv(tmp_path / "list.csv", rows)
    said = batchgen("run", "list.csv", "--model", qwen_folder, "-o", "run", "--batch-size", 4, "--events", "log", folder=tmp_path)
    assert said.code == 0, said
    assert not any(char in said.err + said.out for char in "\r\x1b")
    batches = len(events(tmp_path / "log", "StageBatchDone"))
    assert len(said.err.splitlines()) <= batches + 6
    assert any("left" in line and "done" in line for line in said.err.splitlines())


@pytest.mark.parametrize(("guidance", "tolerance"), [(None, 0), ("3", 1)])
def test_z_image_is_the_hand_called_pipelines_own(guidance: str | None, tolerance: int, tmp_path: Path, z_folder: Path) -> None:
    rows = [{**row, "negative_prompt": "blurry" if guidance and number % 2 else ""} for number, row in enumerate(forty_rows()[:9])]
    write_csv(tmp_path / "list.csv", rows)
    said = batchgen(
        "run", "list.csv", "--model", z_folder, "-o", "run", "--batch-size", 1, "--guidance", guidance or "0", folder=tmp_path,
    )
    assert said.code == 0, said
    theirs = by_hand(z_folder, rows, guidance_scale=float(guidance or 0))
    distances = [int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in zip(pictures(tmp_path / "run"), theirs, strict=True)]
    assert len(distances) == 11
    assert max(distances) <= tolerance


def hub_snapshot(cache: Path, commit: str, folder: Path) -> None:
    """`folder` as the newest commit of Qwen/Qwen-Image in a hub cache."""
    place = cache / "hub" / "models--Qwen--Qwen-Image"
    shutil.copytree(folder, place / "snapshots" / commit)
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)


def test_a_hub_model_is_pinned_to_its_commit(tmp_path: Path, qwen_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, first, second = tmp_path / "cache", "1" * 40, "2" * 40
    hub_snapshot(cache, first, qwen_folder)
    rows = forty_rows()[:4]
    write_csv(tmp_path / "prompts.csv", rows)
    arguments = ["run", "prompts.csv", "--model", "Qwen/Qwen-Image", "--performance-mode", "auto"]
    env = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    said = batchgen(*arguments, folder=tmp_path, env=env)
    assert said.code == 0, said
    run = tmp_path / "results" / "prompts-Qwen-Image"
    assert run_json(run)["model"]["revision"] == first
    assert len(list((run / "outputs").glob("*.png"))) == 4
    hub_snapshot(cache, second, qwen_folder)
    write_csv(tmp_path / "prompts.csv", [*rows, {**rows[0], "prompt": "one more"}])
    said = batchgen(*arguments, folder=tmp_path, env=env)
    assert said.code == 0, said
    assert run_json(run)["model"]["revision"] == first
    assert {row["state"] for row in table(run)} == {"done"}
    assert {texts(path)["revision"] for path in (run / "outputs").glob("*.png")} == {first}
    assert len(table(run)) == 5


def test_standard_input_is_kept_and_resumed(tmp_path: Path, qwen_folder: Path) -> None:
    lines = "\n".join(json.dumps({"prompt": prompt, "width": 64, "height": 64, "steps": 1}) for prompt in ("a", "b")) + "\n"
    said = batchgen("run", "-", "--format", "jsonl", "--model", qwen_folder, "-o", "run", folder=tmp_path, stdin=lines)
    assert said.code == 0, said
    kept = tmp_path / "run" / "manifest.jsonl"
    assert kept.read_text(encoding="utf-8") == lines
    said = batchgen("run", kept, "--model", qwen_folder, "-o", "run", folder=tmp_path)
    assert said.code == 0, said
    assert "2/2 done" in said.err


def test_an_interrupt_ends_in_good_order_and_is_resumed(tmp_path: Path, list_file: Path, qwen_folder: Path) -> None:
    log = tmp_path / "log"
    arguments = ["run", list_file, "--model", qwen_folder, "-o", "run", "--batch-size", 1, "--events", log]
    process = start(arguments, tmp_path, start_new_session=True)
    while process.poll() is None and (not log.exists() or not events(log, "OutputDone")):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (out, err)
    assert "stopped by SIGINT; " in err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "tables" / "timings.txt").is_file()
    states = Counter(row["state"] for row in table(tmp_path / "run"))
    assert states["done"] >= 1
    assert states["pending"] >= 1
    assert batchgen(*arguments, folder=tmp_path).code == 0
    assert Counter(row["state"] for row in table(tmp_path / "run")) == {"done": 44}
