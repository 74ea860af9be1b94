"""The arithmetic of moves: how often a component comes in, and which windows a worker is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fitting import GIB, SHAPE, rehearsed
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.batching import Layout, stage_models
from batchgen.plan.records import Rehearsed, RehearsedComponent, StageProfile
from batchgen.plan.traffic import turns, windows

# calls of one batch, the component asked about, those that put it out, batches -> how often it comes in
TURNS: dict[str, tuple[str, str, str, int, int]] = {
    "nobody puts it out: once an opening": ("a", "a", "", 5, 1),
    "called again and again, alone": ("a b a b", "a", "", 5, 1),
    "two experts, each once a batch": ("a b", "a", "b", 3, 3),
    "the last of a batch is the first of the next": ("a b a", "a", "b", 3, 4),
    "the other of those": ("a b a", "b", "a", 3, 3),
    "others in between do not count": ("a c b", "b", "a", 2, 2),
    "a rival that is never called": ("a", "a", "b", 4, 1),
    "never called itself": ("a", "b", "a", 4, 0),
    "no batch": ("a b", "a", "b", 0, 0),
}


@pytest.mark.parametrize(("order", "name", "rivals", "batches", "expected"), TURNS.values(), ids=TURNS.keys())
def test_turns(order: str, name: str, rivals: str, batches: int, expected: int) -> None:
    assert turns(order.split(), name, rivals.split(), batches) == expected


WINDOWS: dict[str, tuple[int, int, int, tuple[tuple[int, int], ...]]] = {
    "one batch first, then whole windows, then the rest": (100, 4, 30, ((4, 1), (30, 3), (6, 1))),
    "fewer jobs than a batch": (3, 4, 30, ((3, 1),)),
    "no window is smaller than the first": (20, 8, 2, ((8, 1), (8, 1), (4, 1))),
    "nothing left over": (64, 4, 60, ((4, 1), (60, 1))),
    "no jobs": (0, 4, 30, ()),
}


@pytest.mark.parametrize(("jobs", "first", "size", "expected"), WINDOWS.values(), ids=WINDOWS.keys())
def test_windows(jobs: int, first: int, size: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert windows(jobs, first, size) == expected


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 600))
def test_windows_hold_every_job_once(jobs: int, first: int, size: int) -> None:
    assert sum(rows * times for rows, times in windows(jobs, first, size)) == jobs


def experts(name: str, **more: object) -> Rehearsed:
    """Two experts of 10 and 12 GiB that one stage calls one after the other."""
    parts = (RehearsedComponent("transformer", 10 * GIB, 10 * GIB), RehearsedComponent("transformer_2", 12 * GIB, 12 * GIB))
    profile = StageProfile(
        name, SHAPE, 1, ("transformer", "transformer_2"), 22 * GIB, GIB, 1, 10**12, (("transformer", 20), ("transformer_2", 20)))
    return Rehearsed(parts, (replace(profile, **more),))  # type: ignore[arg-type]


def test_offloaded_experts_come_in_for_every_batch() -> None:
    found = experts("denoise", order=("transformer", "transformer_2"))
    (stage,) = stage_models(found.profiles)
    both = Layout({"transformer": "component-offload", "transformer_2": "component-offload"}, found)
    assert both.moved_per_opening(stage, 3) == 3 * 22 * GIB
    one = Layout({"transformer": "resident", "transformer_2": "component-offload"}, found)
    assert one.moved_per_opening(stage, 3) == 12 * GIB


def test_what_a_stage_brings_in_counts_though_no_batch_calls_it() -> None:
    """An encoder of glyphs comes in with the other text encoder, whether a prompt has glyphs or not."""
    found = rehearsed()
    text = replace(found.profiles[0], components=("text_encoder", "vae"), order=("text_encoder",))
    (stage,) = stage_models((text,))
    layout = Layout(dict.fromkeys(("text_encoder", "transformer", "vae"), "component-offload"), found)
    assert layout.moved_per_opening(stage, 2) == found.component("text_encoder").weights_bytes + found.component("vae").weights_bytes
