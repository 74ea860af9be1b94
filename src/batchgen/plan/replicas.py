"""Rule: how several devices are used. Jobs share nothing, so whatever is not part of one group renders jobs of its own."""

from __future__ import annotations

from dataclasses import replace

from batchgen.errors import UsageError
from batchgen.plan import groups
from batchgen.plan.draft import Draft
from batchgen.plan.records import PlanFacts
from batchgen.plan.trail import Decision


def replicas(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """One replica a device, or one a group of devices that share the sharded dit. Raises UsageError for a group that cannot be."""
    count = len(facts.devices)
    size = groups.ruled_size(facts) if draft.fsdp else 1
    if not draft.fsdp and facts.overrides.group_size is not None:
        raise UsageError(
            f"{groups.OPTION} {facts.overrides.group_size}: nothing is sharded, so there are no groups", option=groups.OPTION,
            hint="Add --fsdp, or leave it out.",
        )
    number = count // size
    numbers = {"devices": count, "fsdp": draft.fsdp, "group_size": size}
    decision = Decision.of("replicas", "replicas", str(number), replicas_text(count, size), numbers)
    return replace(draft, replicas=number, group_size=size), (decision,)


def replicas_text(count: int, size: int) -> str:
    """One sentence for people."""
    number = count // size
    if size > 1:
        over = f"; {count - number * size} left over" if count % size else ""
        each = "holds the sharded dit" if number == 1 else "hold a sharded dit each"
        return f"{'One group' if number == 1 else f'{number} groups'} of {size} devices {each}{over}."
    return "One device, one replica." if count == 1 else f"{count} devices, {count} replicas: each renders its own jobs."
