"""Which of two denoisers that share one schedule a list never reaches: that one need not be loaded.

A model says in its index where the first hands over to the second (`boundary_ratio`, a part of the schedule's whole length); the
scheduler says which timesteps so many steps visit. Knows nothing of jobs or placements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchgen.execute.stages import Stage, Stages

FIRST, SECOND = "transformer", "transformer_2"  # noisy part, clean part: the names that pipelines with a boundary_ratio read


def idle_experts(stages: Stages, stage: Stage, steps: Iterable[int | None]) -> frozenset[str]:
    """Components of the stage that no job calls. `steps`: the jobs' step counts; None stands for the model's own.

    Empty where it cannot be told: one denoiser only, or a schedule that depends on the picture's size.
    """
    scheduler, ratio = stages.plain.get("scheduler"), stages.folder.settings.get("boundary_ratio")
    if ratio is None or not {FIRST, SECOND} <= set(stage.components) or scheduler is None or scheduler.config.get("use_dynamic_shifting"):
        return frozenset()
    boundary = float(ratio) * int(scheduler.config["num_train_timesteps"])
    usual = stages.call.get("num_inference_steps")
    asked = {count or usual for count in steps}
    counts = [count for count in asked if isinstance(count, int)]
    if len(counts) < len(asked):
        return frozenset()
    called = {FIRST if timestep >= boundary else SECOND for count in counts for timestep in _timesteps(scheduler, count)}
    return frozenset((FIRST, SECOND)) - called


def _timesteps(scheduler: Any, count: int) -> list[float]:
    fresh = type(scheduler).from_config(scheduler.config)
    fresh.set_timesteps(count)
    found: list[float] = fresh.timesteps.tolist()
    return found


def stand_in(stages: Stages, stage: Stage, names: Iterable[str]) -> None:
    """Weightless copies in place of components that are not loaded: the stage still asks them for channels and patches."""
    for name in names:
        if getattr(stage.pipe, name, None) is None:
            setattr(stage.pipe, name, stages.weightless(name))
