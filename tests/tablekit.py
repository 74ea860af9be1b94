"""A run as its events tell it, on a card of 24 GiB: what the tables of a run are made from in tests."""

from __future__ import annotations

from dataclasses import replace

from batchgen.events import (
    ComponentLoaded,
    ComponentMoved,
    DecisionMade,
    Event,
    JobFailed,
    MemorySample,
    OutputDone,
    StageBatchDone,
    WorkerReady,
)
from batchgen.inventory.records import DeviceFacts
from batchgen.plan.records import Placement, Plan, Predicted, StagePlan
from batchgen.plan.trail import Decision, Trail
from batchgen.report.summary import Summary
from batchgen.units import GIB, MIB


def plan() -> Plan:
    return Plan(
        performance_mode="auto", platform="cuda", devices=(DeviceFacts("RTX 4090", "cuda:0", 24 * GIB, 22 * GIB),), fsdp=False,
        cfg_parallel=False, replicas=1, threshold_gb=30.0, threshold_source="task", batch_size=None, trail=Trail(),
        placements=(
            Placement("transformer", "layerwise-offload", "dit", "model", "the profile streams it in auto mode", 38 * GIB),
            Placement("text_encoder", "component-offload", "text_encoder", "default", "offloaded by default on CUDA", 15 * GIB),
            Placement("vae", "resident", "vae", "global", "22.0 GiB available", 250 * MIB),
        ),
    )


EVENTS: list[Event] = [
    WorkerReady(0, 11, "cuda:0", ("text_encoder", "denoise", "decode"), (), "stages", 6.5, (("torch", "2.13.0"),)),
    ComponentLoaded(0, "text_encoder", "component-offload", 15 * GIB, 31.0),
    ComponentLoaded(0, "transformer", "layerwise-offload", 38 * GIB, 75.0),
    ComponentLoaded(0, "vae", "component-offload", 250 * MIB, 0.5),
    ComponentMoved(0, "text_encoder", "in", 15 * GIB, 0.8),
    StageBatchDone(0, 0, "text_encoder", "1024x1024", ("a", "b", "c", "d"), 3, 1.2, (("text_encoder", 1, 1.1),)),
    ComponentMoved(0, "text_encoder", "out", 0, 0.0),
    StageBatchDone(0, 0, "denoise", "1024x1024", ("a", "b", "c"), 3, 90.0, (("transformer", 50, 88.0),), 40 * GIB),
    StageBatchDone(0, 0, "denoise", "1024x1024", ("d",), 1, 45.0, (("transformer", 50, 44.0),), 40 * GIB),
    DecisionMade(0, "ladder", "decode 1024x1024", "batch 2", "out of memory at batch 4 [24 GiB]; trying 2", (("batch", 4),)),
    StageBatchDone(0, 0, "decode", "1024x1024", ("a", "b"), 2, 2.5, (("vae", 1, 2.4),)),
    StageBatchDone(0, 0, "decode", "1024x1024", ("c",), 1, 1.5, (("vae", 1, 1.4),)),
    MemorySample(0, "decode", 3 * GIB, 12 * GIB, 21 * GIB),
    OutputDone(0, "a", "000000-a.png", 1_500_000, "0" * 64, 3, 33.0, "{}"),
    OutputDone(0, "b", "000001-b.png", 1_500_000, "0" * 64, 3, 33.0, "{}", ("tiled",)),
    OutputDone(0, "c", "000002-c.png", 1_500_000, "0" * 64, 3, 33.0, "{}", ("tiled", "flat")),
    JobFailed(0, "d", "non-finite", "decode", "the picture holds NaN", retry=True),
    JobFailed(0, "d", "non-finite", "decode", "the picture holds NaN\x1b[2J"),
]


def summary() -> Summary:
    found = Summary()
    for event in EVENTS:
        found.listen(event)
    return found


def planned(*, shapes: int = 1) -> Plan:
    """The same plan with a rehearsal's numbers and a trail, written by hand: how a table looks must not hang on what is planned."""
    shape = "1328x1328, 50 steps, guidance 4"
    stages = (
        StagePlan("text_encoder", shape, ("text_encoder",), 32, 15 * GIB, 2 * GIB, 18 * GIB, 10**14, 15 * GIB, seconds=21.0),
        StagePlan("denoise", shape, ("transformer",), 1, 2 * GIB, 619 * MIB, 21 * GIB, 10**17, 38 * GIB, seconds=8040.0),
        StagePlan("decode", shape, ("vae",), 5, 250 * MIB, 14 * GIB, 16 * GIB, 10**15, 0, seconds=33.0),
    )
    if shapes == 2:
        stages += tuple(replace(stage, shape="832x480x81, 30 steps, guidance 5", batch=1) for stage in stages)
    trail = Trail((
        Decision.of("threshold", "threshold", "30", "The profile's threshold of 30 GiB holds.", {"user_gb": None, "model_gb": 30.0}),
        Decision.of("keep-resident", "transformer", "no", "22.0 GiB free is below 30 GiB, so it streams.", {"available_bytes": 22 * GIB}),
        Decision.of("fit", "plan", "fits", "The placements by the rules fit.", {"jobs_assumed": True, "prefetch": True}),
        Decision.of("predict", "plan", "100 jobs", "2 h 15 min on one card.", {"jobs": 100}),
    ))
    return replace(plan(), stages=stages, trail=trail, window=7, predicted=Predicted(21 * GIB, 56 * GIB, 8094.0, 856 * GIB))
