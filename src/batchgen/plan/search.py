"""The search for placements that fit: the combination that moves the fewest bytes over the night, with a batch for every stage. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchgen.plan.batching import Layout, StageModel, largest_batch
from batchgen.plan.records import Mode, Plan, Workload
from batchgen.plan.timing import Speeds, balancing_batch
from batchgen.plan.traffic import windows

DEFAULT_WINDOW = 64
LARGEST_WINDOW = 512
LARGEST_STREAMED = 32  # rows of a batch that is there to cover a stream
MOVE_SHARE = 0.02  # of a window's time that moving weights may take
FIRST_PICTURES_SECONDS = 600.0  # pictures of a window come within this where the moves allow it
ORDER: tuple[Mode, ...] = ("resident", "component-offload", "layerwise-offload")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Placements with the batches that fit them, and what they move."""

    layout: Layout
    batches: Mapping[tuple[str, str], int]  # (shape, stage) -> rows
    window: int
    moved: int  # between host and device, on one replica or rank that renders the whole list
    tiled: bool
    gathered: int = 0  # between the devices of a group, all of them together


@dataclass(frozen=True, slots=True)
class Night:
    """All that a candidate is judged by."""

    stages: tuple[StageModel, ...]
    workload: Workload
    budget: int
    reserve: int
    fixed_batch: int | None
    speeds: Speeds | None

    def jobs(self, stage: StageModel) -> int:
        return dict(self.workload.shapes).get(stage.shape, 0)

    def shared(self, replicas: int) -> Night:
        """The part of one of so many replicas, of the one that gets most."""
        shapes = tuple((shape, -(-jobs // replicas)) for shape, jobs in self.workload.shapes)
        return replace(self, workload=replace(self.workload, shapes=shapes))


def least_moved(plan: Plan, given: Layout, night: Night, modes: tuple[Mode, ...]) -> Candidate | None:
    """All combinations of what is free; the fewest bytes win, then what is held on the device, then the rules' own placements."""
    names = [spot.component for spot in plan.placements]
    free = {
        spot.component for spot in plan.placements
        if spot.by != "user" and given.modes[spot.component] != "fsdp" and given.part(spot.component).weights_bytes  # else: never loaded
    }
    choices = [
        [mode for mode in modes if mode != "layerwise-offload" or given.part(name).block_bytes] if name in free else [given.modes[name]]
        for name in names
    ]
    best: tuple[tuple[int, int, int], Candidate] | None = None
    for combination in itertools.product(*choices):
        layout = replace(given, modes=dict(zip(names, combination, strict=True)))
        found = candidate(layout, night)
        if found is None:
            continue
        same = sum(layout.modes[name] == plan.modes[name] for name in names)
        rank = (found.moved + _idle_bytes(found.layout, night), sum(ORDER.index(mode) for mode in combination if mode in ORDER), -same)
        if best is None or rank < best[0]:
            best = rank, found
    return best[1] if best is not None else None


def _idle_bytes(layout: Layout, night: Night) -> int:
    """What would have to come in of components that no rehearsed batch calls (an encoder of glyphs), should one come that does.

    Without it whatever keeps such a component out would seem to save the bytes of loading it.
    """
    called = {name for stage in night.stages for name, times in stage.calls.items() if times}
    idle = [part for part in layout.rehearsed.components if part.name not in called]
    return sum(part.weights_bytes - layout.held_bytes(part.name) for part in idle)


def candidate(layout: Layout, night: Night) -> Candidate | None:
    """Batches for every stage under these placements; None where one row of some stage does not fit."""
    wanted = {(stage.shape, stage.name): _wanted_batch(layout, stage, night) for stage in night.stages}
    batches: dict[tuple[str, str], int] = {}
    lead = _lead(layout)
    led = [stage for stage in night.stages if lead is not None and lead in stage.components]
    for stage in led:
        batches[stage.shape, stage.name] = largest_batch(
            layout, stage, night.budget, night.reserve, limit=wanted[stage.shape, stage.name])
    room = 0
    if lead is not None and all(batches[stage.shape, stage.name] == wanted[stage.shape, stage.name] for stage in led):
        room = _room_for_blocks(layout, night, led, batches, lead)
    for stage in night.stages:
        if stage not in led:
            batches[stage.shape, stage.name] = largest_batch(
                layout, stage, night.budget - room, night.reserve, limit=wanted[stage.shape, stage.name])
    if any(batches[key] < (wanted[key] if night.fixed_batch is not None else 1) for key in batches):
        return None
    layout = replace(layout, keep=_kept(layout, room, led))
    window = max(_window(layout, night), _first(night, batches))
    return Candidate(layout, batches, window, _moved(layout, night, batches, window), False, _gathered(layout, night, batches))


def stage_seconds(stage: StageModel, found: Candidate, night: Night) -> float | None:
    """Predicted, for all jobs of the stage's shape; None where no rates are known."""
    if night.speeds is None:
        return None
    layout, batch, seconds = found.layout, found.batches[stage.shape, stage.name], 0.0
    for rows, times in windows_of(night, found.batches, found.window):
        count = batch_count(stage, rows, night, found.batches)
        # the moves of a window are shared by the shapes in it
        opening = layout.moved_per_opening(stage, max(1, int(count))) * night.jobs(stage) / max(1, night.workload.jobs)
        seconds += times * (count * night.speeds.batch_seconds(layout, stage, batch) + night.speeds.copy_seconds(int(opening)))
    return seconds


def night_seconds(found: Candidate, night: Night, replicas: int) -> float | None:
    """Predicted, for the whole list shared out among so many replicas or groups; loading is left out."""
    share = night.shared(replicas)
    seconds = [stage_seconds(stage, found, share) for stage in night.stages]
    return None if any(one is None for one in seconds) else sum(one or 0.0 for one in seconds)


def _gathered(layout: Layout, night: Night, batches: Mapping[tuple[str, str], int]) -> int:
    if layout.shards == 1:
        return 0
    turns = [(stage, -(-night.jobs(stage) // batches[stage.shape, stage.name])) for stage in night.stages]
    return layout.shards * sum(layout.gathered(stage, count) for stage, count in turns)


def _lead(layout: Layout) -> str | None:
    """The streamed component with most to stream: what its stages leave over may hold some of its blocks for good."""
    streamed = [part for part in layout.rehearsed.components if layout.mode(part.name) == "layerwise-offload"]
    return max(streamed, key=lambda part: sum(part.block_bytes)).name if streamed else None


def _room_for_blocks(
    layout: Layout, night: Night, led: Sequence[StageModel], batches: Mapping[tuple[str, str], int], lead: str,
) -> int:
    """Bytes that blocks of the lead may take for good: after the batches of its own stages, and so that every other stage still has
    room for its components whole and one row. That holds whether those are whole now or stream, so that making something
    else leaner never makes room here, and more memory never means more moves."""
    whole: dict[str, Mode] = {
        name: "component-offload" if mode == "layerwise-offload" and name != lead else mode for name, mode in layout.modes.items()
    }
    others = replace(layout, modes=whole)
    rows = {(stage.shape, stage.name): 1 if stage.per_row else night.fixed_batch or 1 for stage in night.stages}
    rows.update({(stage.shape, stage.name): batches[stage.shape, stage.name] for stage in led})
    peaks = [(layout if stage in led else others).peak(stage, rows[stage.shape, stage.name], night.reserve) for stage in night.stages]
    return max(0, night.budget - max(peaks))


def streams(layout: Layout, stage: StageModel) -> bool:
    return any(layout.mode(name) == "layerwise-offload" for name in stage.components)


def _wanted_batch(layout: Layout, stage: StageModel, night: Night) -> int:
    if night.fixed_batch is not None:
        return 1 if stage.per_row else night.fixed_batch
    if night.speeds is None or not streams(layout, stage):
        return stage.enough
    # twice the rows whose compute covers the copies: kernels may be faster than they are taken to be
    return max(stage.enough, min(LARGEST_STREAMED, 2 * balancing_batch(night.speeds, layout, stage, LARGEST_STREAMED)))


def _kept(layout: Layout, room: int, led: Sequence[StageModel]) -> dict[str, int]:
    """Device memory that leading blocks of streamed components may take for good, the largest component first."""
    members = {name for stage in led for name in stage.components if layout.mode(name) == "layerwise-offload"}
    streamed = [part for part in layout.rehearsed.components if part.name in members]
    keep: dict[str, int] = {}
    for part in sorted(streamed, key=lambda part: -sum(part.block_bytes)):
        if room > 0:
            keep[part.name] = min(room, sum(part.block_bytes))
            room -= keep[part.name]
    return keep


def _moved(layout: Layout, night: Night, batches: Mapping[tuple[str, str], int], window: int) -> int:
    """Bytes over the whole list. A stage is opened once a window, for all shapes of that road together."""
    total = float(layout.moved_once(name for stage in night.stages for name in stage.components))
    roads: dict[tuple[str, tuple[str, ...]], list[StageModel]] = {}
    for stage in night.stages:
        roads.setdefault((stage.name, stage.components), []).append(stage)
    for rows, times in windows_of(night, batches, window):
        for members in roads.values():
            counts = [batch_count(stage, rows, night, batches) for stage in members]
            opened = min(1.0, sum(counts))  # a rare shape's own stages are not opened in every window
            moved = opened * layout.moved_per_opening(members[0], max(1, math.ceil(sum(counts))))
            total += times * (moved + sum(layout.streamed(stage, 1) * count if count < 1 else layout.streamed(stage, int(count))
                                          for stage, count in zip(members, counts, strict=True)))  # fmt: skip
    return math.ceil(total)


def windows_of(night: Night, batches: Mapping[tuple[str, str], int], window: int) -> tuple[tuple[int, int], ...]:
    """(jobs, how many) of the windows that a worker is given: the first is one batch of the stage that makes the pictures."""
    return windows(night.workload.jobs, _first(night, batches), window)


def _first(night: Night, batches: Mapping[tuple[str, str], int]) -> int:
    """Rows of one batch of the stage that makes the pictures."""
    return night.fixed_batch or max(rows for (_, stage), rows in batches.items() if stage in ("denoise", "pipeline"))


def batch_count(stage: StageModel, rows: int, night: Night, batches: Mapping[tuple[str, str], int]) -> float:
    """Batches of the stage in a window of so many jobs, among which its shape has its share; under 1 where not every window has one."""
    share = rows * night.jobs(stage) / max(1, night.workload.jobs)
    return min(share, 1.0) if share <= 1 else float(math.ceil(share / batches[stage.shape, stage.name]))


def _window(layout: Layout, night: Night) -> int:
    """Jobs a window: enough that moving weights costs little, few enough that pictures come soon.

    It does not follow the memory that is there, so that more memory never means more moves.
    """
    moved = max((layout.moved_per_opening(stage) for stage in night.stages), default=0)
    per_window = sum(layout.moved_per_opening(stage) for stage in night.stages) if moved else 0
    if night.speeds is None:
        return DEFAULT_WINDOW
    shape = night.workload.shapes[0][0]
    per_job = sum(
        night.speeds.compute_seconds(stage, stage.enough) / stage.enough for stage in night.stages if stage.shape == shape
    )  # fmt: skip
    soon = int(FIRST_PICTURES_SECONDS / max(per_job, 1e-6))
    covered = int(night.speeds.copy_seconds(per_window) / (MOVE_SHARE * max(per_job, 1e-6))) + 1 if per_window else 1
    whole = max(_wanted_batch(layout, stage, night) for stage in night.stages if stage.name in ("denoise", "pipeline"))
    return min(LARGEST_WINDOW, max(whole, covered, min(soon, DEFAULT_WINDOW)))


def forced(layout: Layout, night: Night) -> Candidate:
    batches = {(stage.shape, stage.name): night.fixed_batch or 1 for stage in night.stages}
    window = max(_window(layout, night), _first(night, batches))
    return Candidate(layout, batches, window, _moved(layout, night, batches, window), False)
