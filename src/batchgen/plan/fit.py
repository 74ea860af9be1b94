"""Rule: fit. The placements that move the fewest bytes over the night and still fit, and a batch size for every stage.

Takes the plan by the rules and the rehearsal's numbers; gives the plan that is carried out, or refuses with numbers. In auto mode
every component that nobody placed may go anywhere; in the other modes the plan is only checked and its batches chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen.errors import PlanRefusedError
from batchgen.inventory.records import DeviceRates
from batchgen.plan.batching import CONTEXT_BYTES, Layout, StageModel, stage_models
from batchgen.plan.groups import sizes_to_try
from batchgen.plan.records import Mode, Placement, Plan, PlanFacts, Predicted, Rehearsed, RehearsedComponent, StagePlan, Workload
from batchgen.plan.scaling import scaling, scaling_decision
from batchgen.plan.search import Candidate, Night, forced, night_seconds, stage_seconds, streams
from batchgen.plan.several import branches_decision, use_devices
from batchgen.plan.timing import Speeds
from batchgen.plan.trail import Decision
from batchgen.units import duration_text, size_text

WORKER_HOST_BYTES = 3 * 2**30  # a worker process with the libraries loaded


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What the machine and the user add to the plan's facts. Bytes; None: unknown or not said."""

    reserve_bytes: int | None = None
    host_available_bytes: int | None = None
    rates: DeviceRates | None = None
    learned: tuple[tuple[str, float], ...] = ()  # stage -> efficiency shown by runs on this machine
    whole: str = ""  # why the dit cannot be cut over devices; "" where it can


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
    rehearsed, idle = _without_idle(rehearsed)
    decisions += idle
    given = Layout(plan.modes, rehearsed, plan.prefetch, {}, plan.group_size, 2 if plan.cfg_parallel else 1)
    tiled_night = replace(night, stages=_tiled(stages)) if any(stage.tiled for stage in stages) else None
    found = use_devices(plan, facts, given, night, decisions, whole=options.whole)
    if found is None and tiled_night is not None:
        found = use_devices(plan, facts, given, tiled_night, decisions, whole=options.whole)
        if found is not None:
            night, found = tiled_night, replace(found, tiled=True)
            decisions.append(_tiling_decision(plain, found, night))
    if found is None:
        refusal = _refusal(plan, replace(given, shards=max(sizes_to_try(facts)) if plan.fsdp else 1), night, facts)
        if not facts.overrides.force:
            raise refusal
        decisions.append(Decision.of("fit", "plan", "forced", f"{refusal.message} It is run all the same, as --force asks."))
        found = forced(given, night)
    placements, changes = _placements(plan, found, given, night)
    decisions += changes
    return _finished(plan, placements, found, night, decisions, options)


def _with_sizes(plan: Plan, rehearsed: Rehearsed) -> Plan:
    sizes = {part.name: part.weights_bytes for part in rehearsed.components}
    return replace(plan, placements=tuple(replace(spot, bytes=sizes.get(spot.component, spot.bytes)) for spot in plan.placements))


def _without_idle(rehearsed: Rehearsed) -> tuple[Rehearsed, list[Decision]]:
    """Components that no stage of the list brings in are never loaded: they weigh nothing, on the device and on the host."""
    brought = {name for profile in rehearsed.profiles for name in profile.components}
    parts, decisions = [], []
    for part in rehearsed.components:
        if part.name in brought or not part.weights_bytes:
            parts.append(part)
            continue
        parts.append(RehearsedComponent(part.name, 0, 0, (), part.parameters))
        text = f"{part.name} is not loaded: no job of the list calls it, so its {size_text(part.weights_bytes)} count nowhere."
        decisions.append(Decision.of("fit", part.name, "not loaded", text, {"bytes": part.weights_bytes}))
    return replace(rehearsed, components=tuple(parts)), decisions


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


# -- what is said -------------------------------------------------------------------------------------------------------


def _refusal(plan: Plan, layout: Layout, night: Night, facts: PlanFacts) -> PlanRefusedError:
    """Which stage lacks how much, under the placements that need least on the device."""
    names = list(layout.modes)
    fixed = facts.overrides.performance_mode != "auto" or facts.platform != "cuda"
    leanest = layout
    if not fixed:
        lean: dict[str, Mode] = {
            name: "layerwise-offload" if layout.part(name).block_bytes else "component-offload" for name in names
            if layout.modes[name] != "fsdp" and plan.placement(name).by != "user"
        }  # fmt: skip
        leanest = replace(layout, modes=dict(layout.modes) | lean)
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
    elif plan.fsdp and facts.overrides.fsdp:
        hint = "Leave out --fsdp, and each device may stream the model for itself; or use more devices, a smaller size, or --force."
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
            placements.append(_over_fewer(spot, plan.group_size, found.layout.shards))
            continue
        why = _why(spot, mode, found, night)
        placements.append(replace(spot, mode=mode, by="rehearsal", reason=f"{why}; by the rules {spot.mode} ({spot.by}: {spot.reason})"))
        numbers = {"bytes": spot.bytes, "moved_bytes": found.moved, "available_bytes": night.budget}
        decisions.append(Decision.of("fit", spot.component, mode, f"{spot.component}: {mode} instead of {spot.mode}: {why}.", numbers))
    return tuple(placements), decisions


def _over_fewer(spot: Placement, ruled: int, size: int) -> Placement:
    """A sharded component whose group is smaller than the rules had it."""
    if spot.mode != "fsdp" or size >= ruled:
        return spot
    return replace(spot, reason=spot.reason.replace(f"over {ruled} devices", f"over {size} devices, the fewest that hold it"))


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
    if mode == "fsdp":
        share = size_text(layout.held_bytes(spot.component))
        return f"{share} of it on each of {layout.shards} devices, and two blocks whole while it runs: {room}"
    kept = layout.kept(spot.component)
    blocks = len(layout.part(spot.component).block_bytes)
    return f"{size_text(spot.bytes)} do not fit beside the activations; {blocks - kept} of {blocks} blocks stream: {room}"


def _finished(
    plan: Plan, placements: tuple[Placement, ...], found: Candidate, night: Night, decisions: list[Decision], options: FitOptions,
) -> Plan:
    layout = found.layout
    stage_plans = tuple(_stage_plan(stage, found, night) for stage in night.stages)
    decisions += [_stage_decision(stage, plan_row, found, night) for stage, plan_row in zip(night.stages, stage_plans, strict=True)]
    workers = len(plan.devices)  # a process each, a rank of a group too; all of them share the host
    host = workers * _host_bytes(layout, night, found)
    decisions.append(_host_decision(host, options, workers))
    shards = any(mode == "fsdp" for mode in layout.modes.values())
    size = layout.shards if shards else 1
    replicas = len(plan.devices) // size
    seconds = night_seconds(found, night, replicas)
    # every replica, or every rank of a group, is loaded and brings in what is out by itself
    loaded = layout.moved_once(name for stage in night.stages for name in stage.components)
    moved = size * (found.moved + (replicas - 1) * loaded)
    decisions.append(_totals_decision(seconds, moved, found, night, replicas))
    if plan.cfg_parallel and shards:
        decisions.append(branches_decision(size, replicas))
    points = scaling(found, night, len(plan.devices), size)
    if points and len(plan.devices) > 1:
        decisions.append(scaling_decision(points, size))
    return replace(
        plan, placements=placements, fsdp=shards, cfg_parallel=plan.cfg_parallel and shards, replicas=replicas, group_size=size,
        stages=stage_plans, window=found.window, scaling=points,
        keep_bytes=tuple((layout.keep or {}).items()), vae_tiling=found.tiled, trail=plan.trail.add(decisions),
        predicted=Predicted(max(row.peak_bytes for row in stage_plans), host, seconds, moved),
    )


def _stage_plan(stage: StageModel, found: Candidate, night: Night) -> StagePlan:
    layout, batch = found.layout, found.batches[stage.shape, stage.name]
    per_batch = layout.streamed(stage, 1)
    return StagePlan(
        stage.name, stage.shape, stage.components, batch, layout.stage_weights(stage), stage.activations.at(batch),
        layout.peak(stage, batch, night.reserve), stage.flops.at(batch), per_batch + layout.moved_per_opening(stage),
        tiled=stage.tiled, seconds=stage_seconds(stage, found, night),
    )


def _stage_decision(stage: StageModel, row: StagePlan, found: Candidate, night: Night) -> Decision:
    more = found.layout.peak(stage, row.batch + 1, night.reserve)
    if night.fixed_batch is not None:
        limit = "as --batch-size says"
    elif stage.per_row:
        limit = "it takes one at a time"
    elif more > night.budget:
        limit = f"{row.batch + 1} would need {size_text(more)}"
    elif streams(found.layout, stage):
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
    """One worker's host copies of what is not resident, what passes between the stages of a window, and the worker itself."""
    copies = sum(part.weights_bytes for part in layout.rehearsed.components if layout.mode(part.name) not in ("resident", "fsdp"))
    carried = 0
    for stage in night.stages:
        if stage.name not in ("decode", "pipeline"):
            rows = min(found.window, night.jobs(stage))
            carried = max(carried, stage.outputs.at(1) * rows)
    return copies + carried + WORKER_HOST_BYTES


def _host_decision(host: int, options: FitOptions, workers: int) -> Decision:
    there, said = options.host_available_bytes, size_text(host) if workers == 1 else f"{size_text(host)} by {workers} workers"
    numbers = {"host_bytes": host, "host_available_bytes": there, "workers": workers}
    if there is None:
        return Decision.of("host", "host", "unknown", f"Host memory needed: {said}; how much there is was not asked.", numbers)
    if host <= there:
        return Decision.of("host", "host", "fits", f"Host memory: {said} of {size_text(there)}.", numbers)
    text = (
        f"Host memory: {said} would be needed for pinned copies and a window in memory, {size_text(there)} are available: "
        "copies stay mapped from their files and a window spills into the spool, so moves are slower than predicted."
    )
    return Decision.of("host", "host", "short", text, numbers)


def _totals_decision(seconds: float | None, moved: int, found: Candidate, night: Night, replicas: int) -> Decision:
    jobs = night.workload.jobs
    said = f"{jobs} jobs{' (assumed: no manifest)' if night.workload.assumed else ''}, windows of {found.window}"
    numbers = {"jobs": jobs, "window": found.window, "moved_bytes": moved, "seconds": seconds, "replicas": replicas}
    if seconds is None:
        text = f"{said}: {size_text(moved)} moved. No rates are known for this device, so no time is predicted."
    else:
        text = f"{said}: {size_text(moved)} moved, {duration_text(seconds)} predicted."
    return Decision.of("predict", "night", "total", text, numbers)
