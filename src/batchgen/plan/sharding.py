"""Rules: sharding the dit over the devices (FSDP), asked for or chosen where the profile opts in."""

from __future__ import annotations

from dataclasses import replace

from batchgen.errors import UsageError
from batchgen.plan import selectors
from batchgen.plan.draft import Draft, change, chosen_dits, dits, names_text, reaches
from batchgen.plan.groups import most_in_a_group, ruled_size
from batchgen.plan.keep_resident import twice_over
from batchgen.plan.records import DecidedBy, PlanFacts
from batchgen.plan.trail import Decision, Number

RULE = "fsdp"


def requested_sharding(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """`--fsdp` and `--no-fsdp`. Outranks an explicit resident dit, never an explicit offload. Raises UsageError, for `--lora` on it too."""
    asked, count = facts.overrides.fsdp, most_in_a_group(facts)
    if asked is None:
        return draft, ()
    names = dits(facts)
    free = tuple(name for name in names if draft.mode(name) in (None, "resident"))
    numbers: dict[str, Number] = {
        "option": "--fsdp" if asked else "--no-fsdp", "devices": len(facts.devices), "dits": len(names), "free_dits": len(free),
    }  # fmt: skip
    if not asked:
        return draft, (Decision.of(RULE, RULE, "no", "--no-fsdp: the dit is not sharded.", numbers),)
    if facts.platform == "mps":
        raise UsageError("--fsdp: on mps there is one device with one shared memory, so there is nothing to shard over", option="--fsdp",
                         hint="Leave out --fsdp.")  # fmt: skip
    if count < 2:
        where = "is selected" if len(facts.devices) < 2 else "is on each machine"
        raise UsageError(f"--fsdp shards over at least two devices, and {count} {where}", option="--fsdp",
                         hint="Select more devices with --device, or leave out --fsdp.")  # fmt: skip
    if not free:
        why = "the model has no dit" if not names else f"every dit ({names_text(names)}) was placed off the device by the user"
        return draft, (Decision.of(RULE, RULE, "no", f"--fsdp has nothing to shard: {why}.", numbers),)
    adapted = [name for name in free if name in facts.adapted]
    if adapted:
        raise UsageError(f"--fsdp does not go with --lora on {names_text(adapted)}: adapters change its blocks, which are cut over devices",
                         option="--fsdp", hint="Leave out --fsdp, so that each device has the model for itself, or --lora.")  # fmt: skip
    size = ruled_size(facts)
    decisions = [Decision.of(RULE, RULE, "yes", f"--fsdp: {names_text(free)} sharded.", numbers)]
    return _shard(replace(draft, fsdp=True), free, (), decisions, "user", f"--fsdp shards it over {size} devices")


def automatic_sharding(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Auto and speed mode, the option unset: shard where the profile opts in. Speed mode asks for no headroom."""
    if facts.overrides.fsdp is not None:
        return draft, ()
    profile, names, auto = facts.profile, dits(facts), facts.overrides.performance_mode == "auto"
    total, fits = twice_over(facts)
    least = profile.fsdp_auto_min_available_memory_gb
    offloaded = sum(draft.mode(name) != "resident" for name in names)
    numbers: dict[str, Number] = {
        "option": None, "performance_mode": facts.overrides.performance_mode, "devices": len(facts.devices), "dits": len(names),
        "chosen_dits": chosen_dits(facts, draft), "offloaded_dits": offloaded, "available_gb": facts.available_gb,
        "profile_min_available_gb": least, "uses_cfg": profile.uses_cfg, "requires_cfg": profile.fsdp_auto_requires_cfg,
        "weights_bytes": total, "available_bytes": min(device.available_bytes for device in facts.devices),
    }  # fmt: skip
    obstacles = {
        "there is one device": len(facts.devices) < 2,
        "no two devices are on one machine": most_in_a_group(facts) < 2,
        "the model has no dit": not names,
        "adapters (--lora) change its blocks": bool({*names} & {*facts.adapted}),
        f"{numbers['chosen_dits']} of {len(names)} dits were placed by the user": bool(numbers["chosen_dits"]),
        f"profile {profile.name} does not opt in": least is None,
        f"{facts.available_gb:.1f} GiB free is below the profile's {least or 0:g}": auto and not reaches(facts.available_gb, least),
        "the dit is not offloaded": auto and not offloaded,
        f"profile {profile.name} uses no guidance by default": profile.fsdp_auto_requires_cfg and not profile.uses_cfg,
        "all weights fit twice into the free memory of each device": fits,
    }
    obstacle = next((text for text, holds in obstacles.items() if holds), None)
    if obstacle is not None:
        return draft, (Decision.of(RULE, RULE, "no", f"The dit is not sharded by itself: {obstacle}.", numbers),)
    count = ruled_size(facts)
    headroom = f" from {least:g} GiB free" if auto else ""
    why = f"profile {profile.name} shards it over {count} devices{headroom}"
    decisions = [Decision.of(RULE, RULE, "yes", f"The dit is sharded: profile {profile.name} opts in{headroom}.", numbers)]
    helpers = tuple(name for name in draft.unset(facts) if selectors.is_dit_helper(name))
    return _shard(replace(draft, fsdp=True), names, helpers, decisions, "model", why)


def _shard(
    draft: Draft, names: tuple[str, ...], helpers: tuple[str, ...], decisions: list[Decision], by: DecidedBy, why: str
) -> tuple[Draft, tuple[Decision, ...]]:
    for name in names:
        decisions.append(change(RULE, name, draft, "fsdp", f"{name} is sharded."))
        draft = draft.place(name, "fsdp", by, why)
    for name in helpers:
        decisions.append(change(RULE, name, draft, "resident", f"{name} helps the sharded dit, so it stays on the device."))
        draft = draft.place(name, "resident", by, "it helps the sharded dit and stays with it")
    return draft, tuple(decisions)
