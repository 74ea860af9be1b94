"""Rule: whether guidance's two branches run side by side, each on half of a sharded group's devices. Only where it is asked for."""

from __future__ import annotations

from dataclasses import replace

from batchgen.errors import UsageError
from batchgen.plan.draft import Draft
from batchgen.plan.records import PlanFacts
from batchgen.plan.trail import Decision, Number

RULE = "cfg-parallel"
OPTION = "--cfg-parallel"


def cfg_parallel(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Raises UsageError where it is asked for and cannot be."""
    profile, size = facts.profile, draft.group_size
    asked = bool(facts.overrides.cfg_parallel)
    numbers: dict[str, Number] = {
        "asked": asked, "fsdp": draft.fsdp, "uses_cfg": profile.uses_cfg, "supports": profile.supports_cfg_parallel, "group_size": size,
    }  # fmt: skip
    # Each: what stands against it, and what the user may do.
    obstacles = {
        "it needs a sharded dit": (not draft.fsdp, "Add --fsdp, or leave it out: replicas render several jobs at once instead."),
        f"profile {profile.name} uses no guidance": (not profile.uses_cfg, "Leave it out: there is one branch only."),
        f"profile {profile.name} does not allow it": (not profile.supports_cfg_parallel, "Leave it out."),
        f"a group of {size} has no halves": (size % 2 == 1, "Select an even number of devices, or name an even --fsdp-group-size."),
    }
    found = next(((why, hint) for why, (holds, hint) in obstacles.items() if holds), None)
    if asked and found is not None:
        raise UsageError(f"{OPTION}: guidance's branches cannot run in parallel: {found[0]}", option=OPTION, hint=found[1])
    if asked:
        text = f"{OPTION}: each half of a group of {size} computes one branch of guidance."
        return replace(draft, cfg_parallel=True), (Decision.of(RULE, RULE, "yes", text, numbers),)
    why = found[0] if found is not None else f"only {OPTION} asks for it"
    return draft, (Decision.of(RULE, RULE, "no", f"Guidance branches do not run in parallel: {why}.", numbers),)
