"""`batchgen run --fsdp` as a user runs it: on two CPU processes, with tables that say so; and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commandline import batchgen, events, pixels, run_json, write_csv
from safetensors.numpy import save_file

# no seeds: they come from the rows, whoever renders them and over however many devices (field case B52)
ROWS = [{"prompt": f"picture {number} of a red circle", "negative_prompt": "blurry"} for number in range(3)]
SMALL = ("--width", 64, "--height", 64, "--steps", 2)


def test_a_run_over_two_ranks_makes_the_pictures_of_one_worker_and_says_how(qwen_folder: Path, tmp_path: Path) -> None:
    manifest = write_csv(tmp_path / "list.csv", ROWS)
    common = ("run", manifest, "--model", qwen_folder, *SMALL)
    sharded = batchgen(
        *common, "-o", "sharded", "--devices", "cpu,cpu", "--fsdp", "--cfg-parallel", "--events", "said.jsonl", folder=tmp_path,
    )
    alone = batchgen(*common, "-o", "alone", folder=tmp_path)
    assert (sharded.code, alone.code) == (0, 0), f"{sharded}\n{alone}"
    names = sorted(path.name for path in (tmp_path / "alone" / "outputs").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "sharded" / "outputs").iterdir())
    assert len(names) == 3
    for name in names:
        ours, theirs = (pixels(tmp_path / run / "outputs" / name).astype(int) for run in ("sharded", "alone"))
        assert np.abs(ours - theirs).max() <= 1
    plan = run_json(tmp_path / "sharded")["plan"]
    assert (plan["fsdp"], plan["group_size"], plan["replicas"], plan["cfg_parallel"]) == (True, 2, 1, True)
    assert plan["placements"]["transformer"]["mode"] == "fsdp"
    table = (tmp_path / "sharded" / "tables" / "residency.txt").read_text(encoding="utf-8")
    assert "fsdp" in table
    (ready,) = events(tmp_path / "said.jsonl", "WorkerReady")
    assert ready["device"] == "cpu+cpu"
    (cut,) = (step for step in events(tmp_path / "said.jsonl", "DecisionMade") if step["decision"] == "fsdp")
    numbers = dict(cut["numbers"])
    assert numbers["held_bytes_0"] + numbers["held_bytes_1"] == numbers["sharded_bytes"] + 2 * numbers["whole_bytes"]
    assert max(numbers["read_bytes_0"], numbers["read_bytes_1"]) < numbers["file_bytes"]
    assert cut["text"].split(":")[0] in sharded.out + sharded.err
    assert sorted(path.name for path in (tmp_path / "sharded" / "logs").iterdir()) == ["worker-0-rank-1.log", "worker-0.log"]


@pytest.mark.parametrize("command", [("run",), ("run", "--performance-mode", "manual"), ("plan", "--show-residency")])
def test_fsdp_with_a_lora_for_the_denoiser_is_refused_before_the_model_is_read(
    qwen_folder: Path, tmp_path: Path, command: tuple[str, ...],
) -> None:
    save_file({f"transformer.x.lora_{half}.weight": np.zeros((4, 4), np.float32) for half in "AB"}, tmp_path / "style.safetensors")
    manifest = write_csv(tmp_path / "list.csv", ROWS)
    ways = ("--model", qwen_folder, "--devices", "cpu,cpu", "--fsdp", "--lora", "style=style.safetensors")
    said = batchgen(command[0], manifest, *command[1:], *ways, folder=tmp_path)
    assert said.code == 2, said
    assert said.err.count("--fsdp does not go with --lora on transformer") == 1
    assert "hint: Leave out --fsdp" in said.err
    assert not (tmp_path / "results").exists()


def test_fsdp_on_one_device_is_refused_before_anything_is_written(qwen_folder: Path, tmp_path: Path) -> None:
    manifest = write_csv(tmp_path / "list.csv", ROWS)
    said = batchgen("run", manifest, "--model", qwen_folder, "-o", "out", "--device", "cpu", "--fsdp", folder=tmp_path)
    assert said.code == 2
    assert "at least two devices" in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "out").exists()
