"""Sharded over CUDA devices by NCCL: run with --run-gpu on a machine of two or more. Tiny models; pictures, bytes and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import TinyFolder
from enginekit import make_job, make_plan, run_jobs
from sharded import Given, run_ranks

pytestmark = pytest.mark.gpu

CLOSE = 1e-4  # fp32 on a GPU: kernels sum in other orders than for other shapes of the same work
FAMILIES: dict[str, dict[str, Any]] = {"qwen_image": {}, "z_image": {}, "wan22": {"num_frames": 5}}


def jobs_of(family: str) -> list[dict[str, Any]]:
    ending = ".mp4" if FAMILIES[family] else ".png"
    return [
        {"index": index, "prompt": prompt, "negative_prompt": negative, "output": f"{index}{ending}", **FAMILIES[family]}
        for index, (prompt, negative) in enumerate([("a red circle", "blurry"), ("x", "blurry"), ("a small green square", None)])
    ]


@pytest.fixture(scope="module")
def cases(tiny_folder: TinyFolder) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        parts = ["transformer", "transformer_2"] if family == "wan22" else ["transformer"]
        plain = {"model": str(tiny_folder(family)), "jobs": jobs_of(family), "batch_size": 2, "fsdp": parts}
        found[family] = {"name": family} | plain
        found[f"{family} branches"] = {"name": f"{family} branches", "cfg_parallel": True} | plain
        found[f"{family} bf16"] = {"name": f"{family} bf16", "dtype": "bfloat16"} | plain
    found["raises"] = found["qwen_image"] | {"name": "raises", "fault": {"rank": 1, "what": "raise", "job": 1}}
    found["out of memory"] = found["qwen_image"] | {"name": "out of memory", "fault": {"rank": 1, "what": "oom", "job": 1}}
    offloaded = {"text_encoder": "component-offload", "vae": "component-offload"}
    found["others offloaded"] = found["qwen_image"] | {"name": "others offloaded", "modes": offloaded, "windows": 2}
    found["modules"] = {"name": "modules", "kind": "modules"}
    return found


@pytest.fixture(scope="module")
def ranks(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Given]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: NCCL takes one rank a device")
    return run_ranks(2, list(cases.values()), tmp_path_factory.mktemp("ranks"), device="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_the_single_devices(
    family: str, cases: dict[str, Any], ranks: list[dict[str, Given]], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tiny_folder(family)
    jobs = [make_job(**fields) for fields in jobs_of(family)]
    alone = run_jobs(folder, tmp_path, jobs, plan=make_plan(folder, batch_size=2), device="cuda:0").floats
    for name in (family, f"{family} branches"):
        for rank in ranks:
            assert rank[name].error is None
            assert max(float(np.abs(rank[name].floats[key] - alone[key]).max()) for key in alone) <= CLOSE


@pytest.mark.parametrize("name", [*FAMILIES, *(f"{family} bf16" for family in FAMILIES), "others offloaded"])
def test_each_rank_holds_its_share(name: str, ranks: list[dict[str, Given]]) -> None:
    for rank in ranks:
        assert rank[name].error is None
        assert rank[name].found["leftovers"] == 0
        for shards in rank[name].shards.values():
            assert abs(shards.own_bytes - shards.sharded_bytes / 2) <= shards.largest_block_bytes


def test_latents_are_equal_on_all_ranks(ranks: list[dict[str, Given]]) -> None:
    for family in FAMILIES:
        assert ranks[0][family].settled == ranks[1][family].settled


def test_a_failure_on_one_rank_is_the_jobs_alone(ranks: list[dict[str, Given]]) -> None:
    for rank in ranks:
        assert rank["raises"].error is None
        assert len(rank["raises"].of("JobFailed")) == 1
        assert [(step.rule, step.decision) for step in rank["out of memory"].of("DecisionMade") if step.rule == "out-of-memory"] == [
            ("out-of-memory", "halve"),
        ]


def test_hard_modules_come_out_alike(ranks: list[dict[str, Given]]) -> None:
    for rank in ranks:
        found = rank["modules"].found
        assert all(found[name]["apart"] <= 0.05 for name in ("mixed dtypes", "another entry", "tied")), found
