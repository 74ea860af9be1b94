"""The order of the rules, and nothing else. What a rule does stands in its own file."""

from __future__ import annotations

import math
from typing import cast

from batchgen.errors import UsageError
from batchgen.plan import selectors
from batchgen.plan.branches import cfg_parallel
from batchgen.plan.draft import Draft, Rule
from batchgen.plan.explicit import explicit_placements
from batchgen.plan.keep_resident import find_threshold, keep_all_twice_over, keep_by_threshold, threshold
from batchgen.plan.layerwise import layerwise_defaults, layerwise_dit
from batchgen.plan.offload import base_offload, memory_rest, unset_resident
from batchgen.plan.profile import profile
from batchgen.plan.records import PERFORMANCE_MODES, PerformanceMode, Placement, Plan, PlanFacts
from batchgen.plan.replicas import replicas
from batchgen.plan.sharding import automatic_sharding, requested_sharding
from batchgen.plan.trail import Trail

_FIRST: tuple[Rule, ...] = (profile, threshold, explicit_placements, requested_sharding)
_BY_MODE: dict[str, tuple[Rule, ...]] = {
    "manual": (unset_resident,),
    "speed": (unset_resident, automatic_sharding),
    "memory": (base_offload, layerwise_defaults, layerwise_dit, memory_rest),
    "auto": (base_offload, layerwise_defaults, layerwise_dit, automatic_sharding, keep_by_threshold, keep_all_twice_over),
}
_WITHOUT_AUTOMATIC_STEPS: tuple[Rule, ...] = (unset_resident,)
_LAST: tuple[Rule, ...] = (replicas, cfg_parallel)


def rules(facts: PlanFacts) -> tuple[Rule, ...]:
    """The rules that hold for this mode and platform, in their order."""
    automatic = _BY_MODE[facts.overrides.performance_mode] if facts.platform == "cuda" else _WITHOUT_AUTOMATIC_STEPS
    return (*_FIRST, *automatic, *_LAST)


def make_plan(facts: PlanFacts) -> Plan:
    """The plan by the rules, before anything is rehearsed. Raises UsageError for options that cannot be carried out."""
    _check(facts)
    draft, trail = Draft(threshold=find_threshold(facts)), Trail()
    for rule in rules(facts):
        draft, decisions = rule(facts, draft)
        trail = trail.add(decisions)
    placements = tuple(
        Placement(part.name, spot.mode, selectors.group_of(part.name), spot.by, spot.reason, part.bytes_as_loaded)
        for part in facts.model.components
        for spot in (draft.spots[part.name],)
    )
    return Plan(
        performance_mode=cast(PerformanceMode, facts.overrides.performance_mode), platform=facts.platform, devices=facts.devices,
        fsdp=draft.fsdp, cfg_parallel=draft.cfg_parallel, replicas=draft.replicas, group_size=draft.group_size,
        threshold_gb=draft.threshold.gb, threshold_source=draft.threshold.source,
        placements=placements, batch_size=facts.overrides.batch_size, trail=trail,
        prefetch=facts.profile.dit_offload_prefetch_size or 2, model=facts.model.source, profile=facts.profile.name,
    )  # fmt: skip


def _check(facts: PlanFacts) -> None:
    mode, gb = facts.overrides.performance_mode, facts.overrides.keep_resident_min_available_gb
    if mode not in PERFORMANCE_MODES:
        raise UsageError(
            f"--performance-mode: there is no mode {mode!r}. Did you mean {selectors.nearest(mode, PERFORMANCE_MODES)!r}?",
            option="--performance-mode",
            hint=f"Modes: {', '.join(PERFORMANCE_MODES)}.",
        )
    if gb is not None and gb != "never" and not (math.isfinite(gb) and gb >= 0):
        option = "--keep-resident-min-available-gb"
        raise UsageError(f"{option}: {gb!r} is not a size in GiB", option=option, hint="Give a number from 0, or 'never'.")
