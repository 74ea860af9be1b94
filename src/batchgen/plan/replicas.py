"""Rule: how several devices are used when the dit is not sharded, and whether guidance branches run side by side."""

from __future__ import annotations

from dataclasses import replace

from batchgen.plan.draft import Draft
from batchgen.plan.records import PlanFacts
from batchgen.plan.trail import Decision

# The executor runs both guidance branches on each device. Until it can split them over devices, no plan may promise it.
CFG_PARALLEL_CARRIED_OUT = False


def replicas(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Jobs share nothing, so each device that is not part of a shard group renders on its own."""
    count = len(facts.devices)
    number = 1 if draft.fsdp else count
    if draft.fsdp:
        text = f"One group of {count} devices holds the sharded dit."
    else:
        text = "One device, one replica." if count == 1 else f"{count} devices, {count} replicas: each renders its own jobs."
    decision = Decision.of("replicas", "replicas", str(number), text, {"devices": count, "fsdp": draft.fsdp})
    return replace(draft, replicas=number, group_size=count if draft.fsdp else 1), (decision, _cfg_parallel(facts, draft))


def _cfg_parallel(facts: PlanFacts, draft: Draft) -> Decision:
    profile = facts.profile
    numbers = {
        "fsdp": draft.fsdp, "uses_cfg": profile.uses_cfg, "supports": profile.supports_cfg_parallel,
        "enables": profile.auto_enable_cfg_parallel, "carried_out": CFG_PARALLEL_CARRIED_OUT,
    }  # fmt: skip
    if not draft.fsdp:
        why = "it needs a sharded dit"
    elif not profile.uses_cfg:
        why = f"profile {profile.name} uses no guidance"
    elif not (profile.supports_cfg_parallel and profile.auto_enable_cfg_parallel):
        why = f"profile {profile.name} does not allow it"
    else:
        why = "the executor does not split guidance branches over devices"
    return Decision.of("cfg-parallel", "cfg-parallel", "no", f"Guidance branches do not run in parallel: {why}.", numbers)
