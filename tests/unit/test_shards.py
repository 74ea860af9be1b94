"""A share of the jobs: every job in exactly one, by its identity and not by its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.shards import Shard
from scripted_run import make_jobs


@given(jobs=st.integers(0, 60), count=st.integers(1, 12))
def test_every_job_is_in_exactly_one_share(jobs: int, count: int) -> None:
    made = make_jobs(jobs)
    shares = [list(Shard(number, count).of(made)) for number in range(1, count + 1)]
    assert sorted(job.key for share in shares for job in share) == sorted(job.key for job in made)
    assert all([job.index for job in share] == sorted(job.index for job in share) for share in shares), "the manifest's order is kept"


@given(st.lists(st.integers(0, 40), unique=True), st.lists(st.integers(41, 60), unique=True), st.integers(2, 7))
def test_added_rows_move_no_other_job(before: list[int], added: list[int], count: int) -> None:
    def places(names: list[int]) -> dict[str, int]:
        jobs = make_jobs([f"job{name}" for name in names])
        return {job.id: number for number in range(1, count + 1) for job in Shard(number, count).of(jobs)}

    first, second = places(before), places([*added, *before])
    assert first == {name: place for name, place in second.items() if name in first}


def test_shares_are_alike() -> None:
    made = make_jobs(3000)
    sizes = [sum(Shard(number, 8).holds(job.key) for job in made) for number in range(1, 9)]
    assert min(sizes) > 300
    assert max(sizes) < 450


@pytest.mark.parametrize(("text", "shard"), [("1/1", Shard(1, 1)), ("2/3", Shard(2, 3)), (" 10 / 10 ", Shard(10, 10))])
def test_a_shard_is_read(text: str, shard: Shard) -> None:
    assert Shard.parse(text) == shard
    assert Shard.parse(str(shard)) == shard


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/0", "-1/3", "1/3/5", "a/b", "1.0/3", "1/100001", "٣/٣", "1/"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shard"):
        Shard.parse(text)
