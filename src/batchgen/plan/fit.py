"""Rule: fit. The placements that move the fewest bytes over the night and still fit, and a batch size for every stage.

Takes the plan by the rules and the rehearsal's numbers; gives the plan that is carried out, or refuses with numbers. In auto mode
every component that nobody placed may go anywhere; in the other modes the plan is only checked and its batches chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchgen.errors import PlanRefusedError
from batchgen.inventory.records import DeviceRates
from batchgen.plan.batching import CONTEXT_BYTES, Layout, StageModel, largest_batch, stage_models
from batchgen.plan.records import Mode, Placement, Plan, PlanFacts, Predicted, Rehearsed, StagePlan, Workload
from batchgen.plan.timing import Speeds, balancing_batch
from batchgen.plan.trail import Decision
from batchgen.units import duration_text, size_text

DEFAULT_WINDOW = 64
LARGEST_WINDOW = 512
LARGEST_STREAMED = 32  # rows of a batch that is there to cover a stream
MOVE_SHARE = 0.02  # of a window's time that moving weights may take
FIRST_PICTURES_SECONDS = 600.0  # pictures of a window come within this where the moves allow it
WORKER_HOST_BYTES = 3 * 2**30  # a worker process with the libraries loaded
_ORDER: tuple[Mode, ...] = ("resident", "component-offload", "layerwise-offload")


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What the machine and the user add to the plan's facts. Bytes; None: unknown or not said."""

    reserve_bytes: int | None = None
    host_available_bytes: int | None = None
    rates: DeviceRates | None = None
    learned: tuple[tuple[str, float], ...] = ()  # stage -> efficiency shown by runs on this machine


@dataclass(frozen=True, slots=True)
class Candidate:
    """Placements with the batches that fit them, and what they move."""

    layout: Layout
    batches: Mapping[tuple[str, str], int]  # (shape, stage) -> rows
    window: int
    moved: int
    tiled: bool


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


def fit_plan(plan: Plan, facts: PlanFacts, rehearsed: Rehearsed, workload: Workload, options: FitOptions) -> Plan:
    """The plan that is carried out. Raises PlanRefusedError where nothing fits and the user did not force it."""
    plan = _with_sizes(plan, rehearsed)
    reserve = options.reserve_bytes if options.reserve_bytes is not None else CONTEXT_BYTES if facts.platform == "cuda" else 0
    budget = min(device.available_bytes for device in facts.devices)
    speeds = Speeds(options.rates, dict(options.learned)) if options.rates is not None else None
    stages = stage_models(rehearsed.profiles)
    plain = tuple(stage for stage in stages if not stage.tiled)
    night = Night(plain, workload, budget, reserve, facts.overrides.batch_size, speeds)
    decisions = [_facts_decision(plan, night, rehearsed)]
    given = Layout(plan.modes, rehearsed, plan.prefetch, {}, len(facts.devices) if plan.fsdp else 1)
    tiled_night = replace(night, stages=_tiled(stages)) if any(stage.tiled for stage in stages) else None
    found = _search(plan, facts, given, night, decisions)
    if found is None and tiled_night is not None:
        found = _search(plan, facts, given, tiled_night, decisions)
        if found is not None:
            night, found = tiled_night, replace(found, tiled=True)
            decisions.append(_tiling_decision(plain, found, night))
    if found is None:
        refusal = _refusal(given, night, facts)
        if not facts.overrides.force:
            raise refusal
        decisions.append(Decision.of("fit", "plan", "forced", f"{refusal.message} It is run all the same, as --force asks."))
        found = _forced(given, night)
    placements, changes = _placements(plan, found, given, night)
    decisions += changes
    return _finished(plan, placements, found, night, decisions, options)


def _with_sizes(plan: Plan, rehearsed: Rehearsed) -> Plan:
    sizes = {part.name: part.weights_bytes for part in rehearsed.components}
    return replace(plan, placements=tuple(replace(spot, bytes=sizes.get(spot.component, spot.bytes)) for spot in plan.placements))


def _facts_decision(plan: Plan, night: Night, rehearsed: Rehearsed) -> Decision:
    total = sum(part.weights_bytes for part in rehearsed.components)
    ruled = ", ".join(f"{spot.component} {spot.mode}" for spot in plan.placements)
    threshold = "never" if plan.threshold_gb is None else f"{plan.threshold_gb:g} GiB ({plan.threshold_source})"
    text = (
        f"The rules said (threshold {threshold}): {ruled}. Rehearsed: weights {size_text(total)} in all; available "
        f"{size_text(night.budget)}, of which {size_text(night.reserve)} are kept back."
    )
    numbers = {
        "weights_bytes": total, "available_bytes": night.budget, "reserve_bytes": night.reserve,
        "jobs": night.workload.jobs, "jobs_assumed": night.workload.assumed,
    }  # fmt: skip
    return Decision.of("fit", "plan", "rehearsed", text, numbers)


def _tiled(stages: Sequence[StageModel]) -> tuple[StageModel, ...]:
    tiles = {(stage.shape, stage.name): stage for stage in stages if stage.tiled}
    return tuple(tiles.get((stage.shape, stage.name), stage) for stage in stages if not stage.tiled)


# -- the search ---------------------------------------------------------------------------------------------------------


def _search(plan: Plan, facts: PlanFacts, given: Layout, night: Night, decisions: list[Decision]) -> Candidate | None:
    """The candidate that moves least. Outside auto mode, and without automatic steps, only the given placements are tried."""
    if facts.overrides.performance_mode != "auto" or facts.platform != "cuda":
        return _candidate(given, night)
    if plan.fsdp:
        return _search_sharded(plan, facts, given, night, decisions)
    return _least_moved(plan, given, night, _ORDER)


def _search_sharded(plan: Plan, facts: PlanFacts, given: Layout, night: Night, decisions: list[Decision]) -> Candidate | None:
    """Jobs share nothing: a replica on every device beats sharding where one fits without streaming."""
    if facts.overrides.fsdp is None:
        unsharded = replace(given, modes={name: "resident" if mode == "fsdp" else mode for name, mode in given.modes.items()}, shards=1)
        alone = _least_moved(plan, unsharded, night, ("resident", "component-offload"))
        if alone is not None:
            text = f"A replica fits on each of {len(facts.devices)} devices without streaming, so nothing is sharded."
            decisions.append(Decision.of("fit", "fsdp", "no", text, {"devices": len(facts.devices), "moved_bytes": alone.moved}))
            return alone
    return _candidate(given, night) or _least_moved(plan, given, night, _ORDER)


def _least_moved(plan: Plan, given: Layout, night: Night, modes: tuple[Mode, ...]) -> Candidate | None:
    """All combinations of what is free; the fewest bytes win, then what is held on the device, then the rules' own placements."""
    names = [spot.component for spot in plan.placements]
    free = {spot.component for spot in plan.placements if spot.by != "user" and given.modes[spot.component] != "fsdp"}
    choices = [
        [mode for mode in modes if mode != "layerwise-offload" or given.part(name).block_bytes] if name in free else [given.modes[name]]
        for name in names
    ]
    best: tuple[tuple[int, int, int], Candidate] | None = None
    for combination in itertools.product(*choices):
        layout = replace(given, modes=dict(zip(names, combination, strict=True)))
        candidate = _candidate(layout, night)
        if candidate is None:
            continue
        same = sum(layout.modes[name] == plan.modes[name] for name in names)
        rank = (candidate.moved, sum(_ORDER.index(mode) for mode in combination if mode in _ORDER), -same)
        if best is None or rank < best[0]:
            best = rank, candidate
    return best[1] if best is not None else None


def _candidate(layout: Layout, night: Night) -> Candidate | None:
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
    window = _window(layout, night)
    return Candidate(layout, batches, window, _moved(layout, night, batches, window), False)


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


def _streams(layout: Layout, stage: StageModel) -> bool:
    return any(layout.mode(name) == "layerwise-offload" for name in stage.components)


def _wanted_batch(layout: Layout, stage: StageModel, night: Night) -> int:
    if night.fixed_batch is not None:
        return 1 if stage.per_row else night.fixed_batch
    if night.speeds is None or not _streams(layout, stage):
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
    total = layout.moved_once()
    for stage in night.stages:
        denoise = batches.get((stage.shape, "denoise"), batches[stage.shape, stage.name])
        rows = _window_rows(night.jobs(stage), denoise, window)
        for count in rows:
            turns = -(-count // batches[stage.shape, stage.name])
            total += layout.moved_per_opening(stage, turns) + layout.streamed(stage, turns)
    return total


def _window_rows(jobs: int, first: int, window: int) -> list[int]:
    """Jobs of each window: the first is one denoise batch, so that the first pictures come soon."""
    rows, left, size = [], jobs, max(1, min(first, window))
    while left > 0:
        rows.append(min(left, size))
        left -= rows[-1]
        size = window
    return rows


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


def _forced(layout: Layout, night: Night) -> Candidate:
    batches = {(stage.shape, stage.name): night.fixed_batch or 1 for stage in night.stages}
    window = _window(layout, night)
    return Candidate(layout, batches, window, _moved(layout, night, batches, window), False)


# -- what is said -------------------------------------------------------------------------------------------------------


def _refusal(layout: Layout, night: Night, facts: PlanFacts) -> PlanRefusedError:
    """Which stage lacks how much, under the placements that need least on the device."""
    names = list(layout.modes)
    fixed = facts.overrides.performance_mode != "auto" or facts.platform != "cuda"
    leanest = layout
    if not fixed:
        lean: dict[str, Mode] = {
            name: "layerwise-offload" if layout.part(name).block_bytes else "component-offload" for name in names
        }
        leanest = replace(layout, modes=lean)
    batch = night.fixed_batch or 1
    over = [stage for stage in night.stages if leanest.peak(stage, 1 if stage.per_row else batch, night.reserve) > night.budget]
    # a decode could still go in tiles: it is what stands in the way only if nothing else does
    firm = [stage for stage in over if stage.name not in ("decode", "pipeline")]
    worst = max(firm or over or night.stages, key=lambda stage: leanest.peak(stage, 1 if stage.per_row else batch, night.reserve))
    needed = leanest.peak(worst, 1 if worst.per_row else batch, night.reserve)
    weights, activations = leanest.stage_weights(worst), worst.activations.at(1 if worst.per_row else batch)
    fits = [rows for rows in range(1, batch) if leanest.peak(worst, rows, night.reserve) <= night.budget]
    largest = f"--batch-size {fits[-1]}" if fits else None
    message = (
        f"{worst.name} at {worst.shape}, batch {batch}, needs {size_text(needed)} on the device (weights {size_text(weights)}, "
        f"activations {size_text(activations)}, kept back {size_text(night.reserve)}), but {size_text(night.budget)} are available."
    )
    if largest:
        hint = f"Use {largest}, a smaller size, or --force to try it."
    elif fixed:
        hint = "Let --performance-mode auto place the components, offload some, use a smaller size, or --force to try it."
    else:
        hint = "Use a smaller size or fewer frames, free memory on the device, or --force to try it."
    return PlanRefusedError(
        message, needed_bytes=needed, available_bytes=night.budget, largest_that_fits=largest,
        option="--batch-size" if largest else None, hint=hint, stage=worst.name)


def _tiling_decision(plain: Sequence[StageModel], found: Candidate, night: Night) -> Decision:
    stage = max((stage for stage in plain if stage.name in ("decode", "pipeline")), key=lambda stage: stage.activations.at(1))
    text = (
        f"One decode at {stage.shape} needs {size_text(stage.activations.at(1))} of activations, more than there is: the VAE decodes in "
        "tiles, which alters pixels a little and is recorded with each picture."
    )
    return Decision.of("fit", stage.name, "tiling", text, {"activation_bytes": stage.activations.at(1), "available_bytes": night.budget})


def _placements(plan: Plan, found: Candidate, given: Layout, night: Night) -> tuple[tuple[Placement, ...], list[Decision]]:
    placements, decisions = [], []
    for spot in plan.placements:
        mode = found.layout.modes[spot.component]
        if mode == spot.mode:
            placements.append(spot)
            continue
        why = _why(spot, mode, found, night)
        placements.append(replace(spot, mode=mode, by="rehearsal", reason=f"{why}; by the rules {spot.mode} ({spot.by}: {spot.reason})"))
        numbers = {"bytes": spot.bytes, "moved_bytes": found.moved, "available_bytes": night.budget}
        decisions.append(Decision.of("fit", spot.component, mode, f"{spot.component}: {mode} instead of {spot.mode}: {why}.", numbers))
    return tuple(placements), decisions


def _why(spot: Placement, mode: Mode, found: Candidate, night: Night) -> str:
    layout = found.layout
    using = [stage for stage in night.stages if spot.component in stage.components]
    worst = max(using or night.stages, key=lambda stage: layout.peak(stage, found.batches[stage.shape, stage.name], night.reserve))
    batch = found.batches[worst.shape, worst.name]
    peak = layout.peak(worst, batch, night.reserve)
    room = f"{worst.name} at batch {batch} peaks at {size_text(peak)} of {size_text(night.budget)}"
    if mode == "resident":
        return f"it stays in and moves nothing: {room}"
    if mode == "component-offload":
        return f"whole in its own stage, out in the others: {room}"
    kept = layout.kept(spot.component)
    blocks = len(layout.part(spot.component).block_bytes)
    return f"{size_text(spot.bytes)} do not fit beside the activations; {blocks - kept} of {blocks} blocks stream: {room}"


def _finished(
    plan: Plan, placements: tuple[Placement, ...], found: Candidate, night: Night, decisions: list[Decision], options: FitOptions,
) -> Plan:
    layout = found.layout
    stage_plans = tuple(_stage_plan(stage, found, night) for stage in night.stages)
    decisions += [_stage_decision(stage, plan_row, found, night) for stage, plan_row in zip(night.stages, stage_plans, strict=True)]
    host = _host_bytes(layout, night, found)
    decisions.append(_host_decision(host, options))
    known = [row.seconds for row in stage_plans]
    seconds = None if any(second is None for second in known) else sum(second or 0.0 for second in known)
    shards = any(mode == "fsdp" for mode in layout.modes.values())
    replicas = 1 if shards else len(plan.devices)
    decisions.append(_totals_decision(seconds, found, night, replicas))
    return replace(
        plan, placements=placements, fsdp=shards, replicas=replicas, group_size=len(plan.devices) if shards else 1, stages=stage_plans, window=found.window,
        keep_bytes=tuple((layout.keep or {}).items()), vae_tiling=found.tiled, trail=plan.trail.add(decisions),
        predicted=Predicted(
            max(row.peak_bytes for row in stage_plans), host, None if seconds is None else seconds / replicas, found.moved),
    )


def _stage_plan(stage: StageModel, found: Candidate, night: Night) -> StagePlan:
    layout, batch = found.layout, found.batches[stage.shape, stage.name]
    per_batch = layout.streamed(stage, 1)
    seconds = None
    if night.speeds is not None:
        first = found.batches.get((stage.shape, "denoise"), batch)
        windows = _window_rows(night.jobs(stage), first, found.window)
        seconds = sum(
            -(-rows // batch) * night.speeds.batch_seconds(layout, stage, batch)
            + night.speeds.copy_seconds(layout.moved_per_opening(stage, -(-rows // batch))) for rows in windows
        )  # fmt: skip
    return StagePlan(
        stage.name, stage.shape, stage.components, batch, layout.stage_weights(stage), stage.activations.at(batch),
        layout.peak(stage, batch, night.reserve), stage.flops.at(batch), per_batch + layout.moved_per_opening(stage),
        tiled=stage.tiled, seconds=seconds,
    )


def _stage_decision(stage: StageModel, row: StagePlan, found: Candidate, night: Night) -> Decision:
    more = found.layout.peak(stage, row.batch + 1, night.reserve)
    if night.fixed_batch is not None:
        limit = "as --batch-size says"
    elif stage.per_row:
        limit = "it takes one at a time"
    elif more > night.budget:
        limit = f"{row.batch + 1} would need {size_text(more)}"
    elif _streams(found.layout, stage):
        limit = "its compute covers the stream"
    else:
        limit = "more gains nothing" if row.batch >= stage.enough else "the rest is for blocks that stay in"
    text = (
        f"{stage.name} at {stage.shape}: batch {row.batch} ({limit}); weights {size_text(row.weights_bytes)} + activations "
        f"{size_text(row.activation_bytes)} + kept back {size_text(night.reserve)}: peak {size_text(row.peak_bytes)} of "
        f"{size_text(night.budget)}."
    )
    numbers = {
        "weights_bytes": row.weights_bytes, "activation_bytes": row.activation_bytes, "peak_bytes": row.peak_bytes,
        "available_bytes": night.budget, "next_peak_bytes": more, "transfer_bytes": row.transfer_bytes,
    }  # fmt: skip
    return Decision.of("batch", stage.name, str(row.batch), text, numbers)


def _host_bytes(layout: Layout, night: Night, found: Candidate) -> int:
    """Host copies of what is not resident, what passes between the stages of a window, and the worker itself."""
    copies = sum(part.weights_bytes for part in layout.rehearsed.components if layout.mode(part.name) != "resident")
    carried = 0
    for stage in night.stages:
        if stage.name not in ("decode", "pipeline"):
            rows = min(found.window, night.jobs(stage))
            carried = max(carried, stage.outputs.at(1) * rows)
    return copies + carried + WORKER_HOST_BYTES


def _host_decision(host: int, options: FitOptions) -> Decision:
    there = options.host_available_bytes
    numbers = {"host_bytes": host, "host_available_bytes": there}
    if there is None:
        return Decision.of("host", "host", "unknown", f"Host memory needed: {size_text(host)}; how much there is was not asked.", numbers)
    if host <= there:
        return Decision.of("host", "host", "fits", f"Host memory: {size_text(host)} of {size_text(there)}.", numbers)
    text = (
        f"Host memory: {size_text(host)} would be needed for pinned copies and a window in memory, {size_text(there)} are available: "
        "copies stay mapped from their files and a window spills into the spool, so moves are slower than predicted."
    )
    return Decision.of("host", "host", "short", text, numbers)


def _totals_decision(seconds: float | None, found: Candidate, night: Night, replicas: int) -> Decision:
    jobs = night.workload.jobs
    said = f"{jobs} jobs{' (assumed: no manifest)' if night.workload.assumed else ''}, windows of {found.window}"
    numbers = {"jobs": jobs, "window": found.window, "moved_bytes": found.moved, "seconds": seconds, "replicas": replicas}
    if seconds is None:
        text = f"{said}: {size_text(found.moved)} moved. No rates are known for this device, so no time is predicted."
    else:
        text = f"{said}: {size_text(found.moved)} moved, {duration_text(seconds / replicas)} predicted."
    return Decision.of("predict", "night", "total", text, numbers)
