"""Sharded over gloo ranks: pictures are the single worker's, each rank reads and holds its share, and a failure of one is all ranks'.

The ranks are started once for all cases (tests/sharded.py); what is asserted here is what they gave.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.events import StageBatchDone
from batchgen.jobs import row_hash, seed_from_row
from conftest import TinyFolder
from enginekit import make_job, make_plan, run_jobs
from sharded import Given, run_ranks

CLOSE = 1e-5
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen_image": {}, "z_image": {}, "wan21": {"num_frames": 5}, "wan22": {"num_frames": 5},
    "lumina2": {},  # through its ordinary call
}
# diffusers models with blocks of other shapes: lists of several kinds, nested ones, buffers
LOADED = [
    ("qwen_image", "transformer", "bfloat16"), ("sdxl", "unet", "bfloat16"), ("sd3", "transformer", "bfloat16"),
    ("ltx", "transformer", "float32"), ("wan21", "transformer", "bfloat16"), ("z_image", "transformer", "float32"),
]  # fmt: skip
GOOD, BAD = ("j0", "j2"), "j1"


def jobs_of(family: str, count: int = 3) -> list[dict[str, Any]]:
    """Rows that give no seed: it comes from the row's own hash."""
    told = [("a red circle", "blurry", 4.0), ("x", "blurry", 4.0), ("a small green square", None, 1.0)]
    ending = ".mp4" if FAMILIES[family] else ".png"
    return [
        {"index": index, "prompt": prompt, "negative_prompt": negative, "guidance": guidance, "output": f"{index}{ending}",
         "seed": seed_from_row(row_hash({"prompt": prompt, "guidance": guidance}), 0), **FAMILIES[family]}
        for index, (prompt, negative, guidance) in enumerate(told[:count])
    ]  # fmt: skip


def cases_of(tiny_folder: TinyFolder) -> list[dict[str, Any]]:
    def case(name: str, family: str, **more: Any) -> dict[str, Any]:
        fsdp = ["transformer", "transformer_2"] if family == "wan22" else ["transformer"]
        return {"name": name, "model": str(tiny_folder(family)), "jobs": jobs_of(family), "batch_size": 2, "fsdp": fsdp} | more

    qwen = str(tiny_folder("qwen_image"))
    plain = [case(family, family) for family in FAMILIES]
    branches = [case(f"{family} branches", family, cfg_parallel=True) for family in ("qwen_image", "z_image", "wan22")]
    offloaded = {"text_encoder": "component-offload", "vae": "component-offload"}
    loads = [
        {"name": f"load {family} {dtype}", "kind": "load", "model": str(tiny_folder(family)), "component": part, "dtype": dtype}
        for family, part, dtype in LOADED
    ]
    return [
        *plain, *branches, *loads,
        case("wan21 bf16", "wan21", dtype="bfloat16"),
        case("others offloaded", "qwen_image", modes=offloaded, windows=2),
        case("raises", "qwen_image", fault={"rank": 1, "what": "raise", "job": 1}),
        case("out of memory", "qwen_image", batch_size=3, jobs=jobs_of("qwen_image", 2) * 1, fault={"rank": 1, "what": "oom", "job": 1}),
        case("out of memory for good", "qwen_image", batch_size=1, fault={"rank": 1, "what": "oom", "job": 1, "most": 0}),
        case("another seed", "qwen_image", fault={"rank": 1, "what": "seed", "job": 1}),
        {"name": "modules", "kind": "modules", "model": qwen},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def cases(tiny_folder: TinyFolder) -> dict[str, dict[str, Any]]:
    return {case["name"]: case for case in cases_of(tiny_folder)}


@pytest.fixture(scope="module")
def two(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Given]]:
    return run_ranks(2, list(cases.values()), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same jobs by one worker, made at first use."""
    made: dict[tuple[str, str, int], dict[str, np.ndarray]] = {}

    def floats(case: dict[str, Any]) -> dict[str, np.ndarray]:
        model, dtype, batch = Path(case["model"]), case.get("dtype", "float32"), case["batch_size"]
        if (model.name, dtype, batch) not in made:
            jobs = [make_job(**fields) for fields in jobs_of(model.name)]
            ran = run_jobs(model, tmp_path_factory.mktemp("alone"), jobs, plan=make_plan(model, batch_size=batch), dtype=dtype)
            assert not ran.failed
            made[model.name, dtype, batch] = ran.floats
        return made[model.name, dtype, batch]

    return floats


def apart(case: Given, whole: dict[str, np.ndarray]) -> float:
    assert case.floats
    return max(float(np.abs(value - whole[key]).max()) for key, value in case.floats.items())


PICTURES = [*FAMILIES, "qwen_image branches", "z_image branches", "wan22 branches", "wan21 bf16", "others offloaded"]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_the_single_workers(name: str, cases: dict[str, Any], two: list[dict[str, Given]], alone: Any) -> None:
    for rank in two:
        given = rank[name]
        assert given.error is None
        assert len(given.floats) == len(cases[name]["jobs"])
        assert apart(given, alone(cases[name])) <= CLOSE
    assert [len(rank[name].of("OutputDone")) for rank in two] == [3, 0], "the first rank writes, alone"


@pytest.mark.parametrize("name", PICTURES)
def test_latents_are_equal_on_all_ranks(name: str, two: list[dict[str, Given]]) -> None:
    """Field case B52: noise drawn by each rank for itself gives static. Compared before any rank takes another's."""
    first, second = (rank[name] for rank in two)
    assert first.settled == second.settled
    assert name == "lumina2" or any(what == "the denoised latents" for what, _ in first.settled)
    assert {key: value.tobytes() for key, value in first.floats.items()} == {key: value.tobytes() for key, value in second.floats.items()}


def test_a_seed_that_differs_on_one_rank_stops_the_group(two: list[dict[str, Given]]) -> None:
    """Field case B52."""
    for rank in two:
        assert rank["another seed"].error == "GroupDivergedError: the ranks differ in the jobs and their noise"
        assert not any(key.startswith("0" * 31 + "1") for key in rank["another seed"].floats)


@pytest.mark.parametrize(("name", "whole"), [("qwen_image branches", 9), ("z_image branches", 12), ("wan22 branches", 9)])
def test_each_half_runs_one_branch(name: str, whole: int, two: list[dict[str, Given]]) -> None:
    """Three steps; two rows of guidance in one batch, in another one row without, but for Z-Image, where 1 is not off."""
    family = name.split()[0]
    for rank in two:
        plain = {part: calls for part, calls in rank[family].calls.items() if part.startswith("transformer")}
        split = {part: calls for part, calls in rank[name].calls.items() if part.startswith("transformer")}
        assert sum(plain.values()) == whole
        assert sum(split.values()) == 3 + 3


@pytest.mark.parametrize("name", [*FAMILIES, "wan21 bf16"])
def test_each_rank_holds_and_reads_its_share(name: str, two: list[dict[str, Given]]) -> None:
    """Of what is cut: a half, give or take a block; of the files: a half of that and what stays whole."""
    for rank in two:
        given = rank[name]
        for part, shards in given.shards.items():
            assert given.modes[part] == "fsdp"
            assert abs(shards.own_bytes - shards.sharded_bytes / 2) <= shards.largest_block_bytes
            assert shards.own_bytes < shards.sharded_bytes
            stored = 2 if "bf16" in name else 1  # the tiny files are fp32
            assert shards.read_bytes <= shards.whole_bytes * stored + stored * (shards.sharded_bytes / 2 + shards.largest_block_bytes)
            assert shards.read_bytes < shards.file_bytes
    assert two[0][name].shards


def test_wan_keeps_its_fp32_parts_whole(two: list[dict[str, Given]]) -> None:
    assert two[0]["wan21 bf16"].found["dtypes"]["transformer"] == ["torch.bfloat16", "torch.float32"]
    assert two[0]["wan21 bf16"].modes["transformer"] == "fsdp"


@pytest.mark.parametrize(("family", "part", "dtype"), LOADED)
def test_weights_are_the_ordinary_loaders(family: str, part: str, dtype: str, two: list[dict[str, Given]]) -> None:
    """Names, dtypes, values and buffers, put together again from all ranks."""
    for rank in two:
        given = rank[f"load {family} {dtype}"]
        assert given.found["wrong"] == []
        assert given.found["cut"] > 0
    first, second = (rank[f"load {family} {dtype}"].shards[part] for rank in two)
    assert first.own_bytes + second.own_bytes == first.sharded_bytes
    assert first.sharded_bytes + first.whole_bytes == two[0][f"load {family} {dtype}"].found["loaded_bytes"]


def test_other_components_live_on_each_rank(two: list[dict[str, Given]]) -> None:
    for rank in two:
        assert rank["others offloaded"].modes == {
            "text_encoder": "component-offload", "transformer": "fsdp", "vae": "component-offload",
        }


@pytest.mark.parametrize("name", [*PICTURES, "raises"])
def test_nothing_stays_gathered_between_batches(name: str, two: list[dict[str, Given]]) -> None:
    """Nor noted for a backward that never comes, which over a night would be gigabytes."""
    assert [rank[name].found["leftovers"] for rank in two] == [0, 0]


def test_a_job_that_raises_on_one_rank_fails_on_all_alone(two: list[dict[str, Given]], cases: dict[str, Any], alone: Any) -> None:
    first, second = (rank["raises"] for rank in two)
    assert first.error is second.error is None
    (failed,) = first.of("JobFailed")
    assert (failed.kind, failed.stage) == ("error", "denoise")
    assert failed.reason == "rank 1 (cpu): ValueError: this rank alone"
    assert [event.key for event in second.of("JobFailed")] == [failed.key]
    assert len(first.of("OutputDone")) == 2
    assert apart(first, alone(cases["raises"])) <= CLOSE


def test_memory_that_runs_out_on_one_rank_makes_all_take_the_same_step(two: list[dict[str, Given]]) -> None:
    """Two rows do not fit on rank 1 and one does: both ranks halve the batch, and nothing fails."""
    for rank in two:
        given = rank["out of memory"]
        assert given.error is None
        assert not given.of("JobFailed")
        steps = [(step.rule, step.decision) for step in given.of("DecisionMade") if step.rule == "out-of-memory"]
        assert steps == [("out-of-memory", "halve")]
        assert [done.size for done in given.of("StageBatchDone") if done.stage == "denoise"] == [1, 1]


def test_a_job_that_never_fits_on_one_rank_fails_on_all_alone(two: list[dict[str, Given]]) -> None:
    for rank in two:
        (failed,) = rank["out of memory for good"].of("JobFailed")
        assert failed.kind == "out-of-memory"
        assert "rank 1 (cpu)" in failed.reason or rank is two[1]
        assert len(rank["out of memory for good"].floats) == 2


def test_hard_modules_come_out_alike(two: list[dict[str, Given]]) -> None:
    """Field case B53: fp32 norms in bf16 blocks, an entry other than forward, weights in several places, nothing to shard."""
    for rank in two:
        found = rank["modules"].found
        assert found["mixed dtypes"]["apart"] == found["another entry"]["apart"] == found["tied"]["apart"] == 0.0
        rows = [f"blocks.{index}.{part}" for index in range(3) for part in ("norm.bias", "norm.weight", "table")]
        assert found["mixed dtypes"]["whole"] == sorted(["first.bias", "first.weight", *rows])
        assert {"blocks.0.up.weight", "blocks.2.down.weight", "last.bias"} <= set(found["tied"]["whole"])
        assert found["mixed dtypes"]["cut_blocks"] == 3
        assert found["broken off"] == {"own": 0.0, "older torch": 0.0}
        assert found["nothing repeated"] == "Plain has no repeated blocks to shard"


@pytest.mark.long
def test_four_ranks_make_the_same_pictures(cases: dict[str, dict[str, Any]], alone: Any, tmp_path: Path) -> None:
    names = ["qwen_image", "qwen_image branches"]
    ranks = run_ranks(4, [cases[name] for name in names], tmp_path)
    for name in names:
        shards = [rank[name].shards["transformer"] for rank in ranks]
        assert sum(part.own_bytes for part in shards) == shards[0].sharded_bytes
        for rank, part in zip(ranks, shards, strict=True):
            assert apart(rank[name], alone(cases[name])) <= CLOSE
            assert abs(part.own_bytes - part.sharded_bytes / 4) <= part.largest_block_bytes
        assert len({tuple(rank[name].settled) for rank in ranks}) == 1
    assert StageBatchDone.__name__ in {type(event).__name__ for event in ranks[0]["qwen_image"].events}
