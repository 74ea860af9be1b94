"""How many devices share one sharded dit. By the rules all that may; the fit makes the groups as small as holds the model."""

from __future__ import annotations

from batchgen.errors import UsageError
from batchgen.plan.records import PlanFacts

OPTION = "--fsdp-group-size"


def most_in_a_group(facts: PlanFacts) -> int:
    """A group of ranks does not reach beyond one machine."""
    return min(len(facts.devices), facts.largest_group or len(facts.devices))


def ruled_size(facts: PlanFacts) -> int:
    """Devices of a group before anything is known of sizes: the user's number, else as many as may. Raises UsageError."""
    asked, most = facts.overrides.group_size, most_in_a_group(facts)
    if asked is None:
        return most
    if asked > most:
        where = "selected" if most == len(facts.devices) else "on one machine"
        use = f"Use 2 to {most}, or leave it out." if most > 2 else "Use 2, or leave it out." if most == 2 else "Leave it out."
        raise UsageError(f"{OPTION} {asked}: {most} {'device is' if most == 1 else 'devices are'} {where}", option=OPTION, hint=use)
    return asked


def sizes_to_try(facts: PlanFacts) -> tuple[int, ...]:
    """Group sizes from the smallest on: those that leave no device over, of even size where guidance's branches are split."""
    if facts.overrides.group_size is not None:
        return (ruled_size(facts),)
    count, most = len(facts.devices), most_in_a_group(facts)
    sizes = [size for size in range(2, most + 1) if count % size == 0 and not (facts.overrides.cfg_parallel and size % 2)]
    return tuple(sizes) or (most,)
