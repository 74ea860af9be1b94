"""Batches, caches and spool files of a window, without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.execute.guidance import JobGuidance
from batchgen.execute.memory import HostBudget
from batchgen.execute.stages import Item
from batchgen.execute.windows import AUTO_BATCH, BatchSizes, EncodedCache, Row, chunks, group_rows, spool_rows, unspool
from batchgen.jobs import Job
from batchgen.plan.records import StagePlan
from enginekit import make_job, make_plan

ON, OFF = JobGuidance(True, 3.0), JobGuidance(False, 1.0)


@given(st.lists(st.integers(), max_size=200), st.integers(1, 50))
def test_chunks_hold_every_item_once_in_order_and_are_nearly_equal(items: list[int], size: int) -> None:
    parts = list(chunks(items, size))
    assert [item for part in parts for item in part] == items
    lengths = [len(part) for part in parts]
    assert all(0 < length <= size for length in lengths)
    assert not lengths or max(lengths) - min(lengths) <= 1
    assert len(lengths) == -(-len(items) // size)


def rows(*jobs: tuple[Job, JobGuidance]) -> list[Row]:
    return [Row(job, guidance) for job, guidance in jobs]


def grouped(found: list[Row], *, mixes: bool, apart: bool = True) -> list[list[int]]:
    return [[row.job.index for row in group] for _, group in group_rows(found, mixes_guidance=mixes, apart=apart)]


def test_rows_of_other_sizes_steps_or_frames_never_share_a_batch() -> None:
    found = rows(
        (make_job(0, "a"), ON), (make_job(1, "b", width=128), ON), (make_job(2, "c", steps=9), ON), (make_job(3, "d", num_frames=5), ON),
        (make_job(4, "e", seed=7, negative_prompt="x"), ON),
    )
    assert grouped(found, mixes=True) == [[0, 4], [1], [2], [3]]


def test_rows_of_other_guidance_share_one_where_the_guider_allows_it() -> None:
    found = rows((make_job(0, "a", guidance=3.0), ON), (make_job(1, "b", guidance=5.0), ON), (make_job(2, "c", guidance=1.0), OFF))
    assert grouped(found, mixes=True) == [[0, 1], [2]]
    assert grouped(found, mixes=True, apart=False) == [[0, 1, 2]]
    assert grouped(found, mixes=False) == [[0], [1], [2]]


def test_rows_share_what_cannot_be_joined_only_if_it_is_the_same_object() -> None:
    found = rows((make_job(0, "a"), ON), (make_job(1, "b"), ON), (make_job(2, "c"), ON))
    one, other = [torch.zeros(1)], [torch.zeros(1)]
    for row, value in zip(found, (one, other, one), strict=True):
        row.values["image_latents"] = value
    assert grouped(found, mixes=True) == [[0, 2], [1]]


def test_batch_sizes_are_the_users_then_the_plans_then_by_pixels(tmp_path: Path) -> None:
    import tiny

    tiny.z_image(tmp_path / "model")
    shape = make_job(0, "a").shape
    stage = StagePlan("denoise", shape.text, ("transformer",), 3, 0, 0, 0, 0, 0)
    elsewhere = StagePlan("denoise", "other", ("transformer",), 2, 0, 0, 0, 0, 0)
    plan = make_plan(tmp_path / "model", stages=(stage, elsewhere))
    assert BatchSizes(make_plan(tmp_path / "model", batch_size=5, stages=(stage,))).of("denoise", shape, 64 * 64) == 5
    assert BatchSizes(plan).of("denoise", shape, 64 * 64) == 3
    assert BatchSizes(plan).of("denoise", make_job(0, "a", width=96).shape, 64 * 64) == 2  # unplanned: the least of the stage's
    assert BatchSizes(plan).of("decode", shape, 64 * 64) == AUTO_BATCH
    assert BatchSizes(plan).of("decode", shape, 1024 * 1024) == 2
    assert BatchSizes(plan).of("decode", shape, 4096 * 4096) == 1
    assert BatchSizes(plan).of("text_encoder", None, None) == AUTO_BATCH


def test_the_cache_drops_the_least_recently_used_beyond_its_budget() -> None:
    cache = EncodedCache(HostBudget(4 * 4000, None), share=0.25)
    for key in ("a", "b"):
        cache.put(key, {"x": torch.zeros(400)})
    assert cache.held_bytes == 3200
    assert cache.get("a") is not None
    cache.put("c", {"x": torch.zeros(400)})
    assert cache.get("b") is None
    assert cache.get("a") is not None
    assert cache.held_bytes == 3200


def test_spooled_rows_come_back_as_they_were(tmp_path: Path) -> None:
    first, second = rows((make_job(0, "a"), ON), (make_job(1, "b"), ON))
    first.values = {
        "latents": torch.randn(1, 4, 8, 8), "dtype": torch.bfloat16, "height": 64, "batch_size": None, "name": "x",
        "embeds": Item(torch.randn(5, 3)), "list": [torch.ones(2), 3.5],
    }
    first.batch, first.seconds, first.flags = 2, 1.5, ("tiled",)
    first.generator = torch.Generator().manual_seed(3).get_state()
    second.values = {"latents": torch.zeros(1, 4, 8, 8, dtype=torch.bfloat16)}
    path = tmp_path / "spool" / "a.safetensors"
    spool_rows(path, [first, second])
    back = {row.job.key: Row(row.job, row.guidance) for row in (first, second)}
    unspool(path, back)
    one, two = back[first.job.key], back[second.job.key]
    assert torch.equal(one.values["latents"], first.values["latents"])
    assert torch.equal(one.values["embeds"].value, first.values["embeds"].value)
    assert torch.equal(one.values["list"][0], torch.ones(2))
    assert one.values["list"][1] == 3.5
    assert (one.values["dtype"], one.values["height"], one.values["batch_size"], one.values["name"]) == (torch.bfloat16, 64, None, "x")
    assert (one.batch, one.seconds, one.flags) == (2, 1.5, ("tiled",))
    assert one.generator is not None
    assert torch.equal(one.generator, first.generator)
    assert two.values["latents"].dtype == torch.bfloat16
    assert two.generator is None
    assert [file.name for file in path.parent.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("content", [b"", b"\x10\x00\x00\x00\x00\x00\x00\x00{", b"x" * 100])
def test_a_broken_spool_file_is_told_by_value_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    row = Row(make_job(0, "a"), ON)
    with pytest.raises((ValueError, OSError)):
        unspool(path, {row.job.key: row})
    assert row.values == {}


def test_a_rows_noise_comes_from_its_seed_whatever_else_is_drawn() -> None:
    row = Row(make_job(0, "a", seed=2**64 - 1), ON)
    first = torch.randn(4, generator=row.generator_now())
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(4, generator=row.generator_now()))
    generator = row.generator_now()
    torch.randn(4, generator=generator)
    row.generator = generator.get_state()
    assert not torch.equal(first, torch.randn(4, generator=row.generator_now()))
