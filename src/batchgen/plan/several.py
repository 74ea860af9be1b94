"""Rule of the fit: how several devices are used. Replicas, or groups of ranks that share a sharded dit, and how large a group is.

Jobs share nothing, so every group computes what one replica computes: n devices as replicas are n times as fast as one group of n,
unless guidance's branches are split. A group is worth it where a replica does not fit, or where its streams take longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchgen.plan.batching import Layout
from batchgen.plan.groups import sizes_to_try
from batchgen.plan.records import Mode, Plan, PlanFacts
from batchgen.plan.search import ORDER, Candidate, Night, candidate, least_moved, night_seconds
from batchgen.plan.selectors import is_dit, is_dit_helper
from batchgen.plan.trail import Decision, Number
from batchgen.units import duration_text, size_text

RULE = "several-devices"
CLEARLY = 0.9  # of the replicas' time that a group has to stay under: a prediction is no measurement


@dataclass(frozen=True, slots=True)
class _Use:
    """All devices used in one way."""

    found: Candidate
    devices: int

    @property
    def replicas(self) -> int:
        return self.devices // self.found.layout.shards

    def seconds(self, night: Night) -> float | None:
        return night_seconds(self.found, night, self.replicas)

    @property
    def traffic(self) -> int:
        """Bytes over all links, between devices too."""
        return self.found.moved * (self.found.layout.shards if self.found.layout.shards > 1 else 1) + self.found.gathered


def use_devices(
    plan: Plan, facts: PlanFacts, given: Layout, night: Night, decisions: list[Decision], *, whole: str = ""
) -> Candidate | None:
    """The placements that are carried out on each replica or group; None where nothing fits. `whole`: why the dit cannot be cut."""
    automatic = facts.overrides.performance_mode == "auto" and facts.platform == "cuda"
    if plan.fsdp:
        if automatic and facts.overrides.fsdp is None and not facts.overrides.cfg_parallel and facts.overrides.group_size is None:
            if whole:
                decisions.append(Decision.of("fit", "fsdp", "no", f"The dit is not sharded: {whole}.", {"devices": len(facts.devices)}))
                return least_moved(plan, _unsharded(given), night, ORDER)
            alone = least_moved(plan, _unsharded(given), night, ("resident", "component-offload"))
            if alone is not None:
                text = f"A replica fits on each of {len(facts.devices)} devices without streaming, so nothing is sharded."
                numbers: dict[str, Number] = {"devices": len(facts.devices), "moved_bytes": alone.moved}
                decisions.append(Decision.of("fit", "fsdp", "no", text, numbers))
                return alone
        return _smallest_group(plan, facts, given, night, decisions, automatic=automatic)
    found = least_moved(plan, given, night, ORDER) if automatic else candidate(given, night)
    if not automatic or len(facts.devices) < 2:
        return found
    return _weighed(plan, facts, given, night, found, decisions, whole)


def groups_text(number: int, size: int) -> str:
    return f"{number} {'group' if number == 1 else 'groups'} of {size}"


def branches_decision(size: int, replicas: int) -> Decision:
    """The halves of the groups that were found."""
    text = f"--cfg-parallel: each half of a group of {size} computes one branch of guidance, {groups_text(replicas, size)} in all."
    return Decision.of("cfg-parallel", "cfg-parallel", "yes", text, {"group_size": size, "replicas": replicas})


def _unsharded(given: Layout) -> Layout:
    """The same on one device alone."""
    modes: dict[str, Mode] = {name: "resident" if mode == "fsdp" else mode for name, mode in given.modes.items()}
    return replace(given, modes=modes, shards=1)


def _smallest_group(
    plan: Plan, facts: PlanFacts, given: Layout, night: Night, decisions: list[Decision], *, automatic: bool
) -> Candidate | None:
    """Groups as small as hold the model: the fewer devices one takes, the more of them render side by side."""
    tried: list[str] = []
    for size in sizes_to_try(facts):
        layout = replace(given, shards=size)
        found = least_moved(plan, layout, night, ORDER) if automatic else candidate(layout, night)
        if found is None:
            tried.append(str(size))
            continue
        number = len(facts.devices) // size
        group = groups_text(number, size)
        why = f"; {' or '.join(tried)} devices do not hold it" if tried else ""
        text = f"The sharded dit fits on {size} devices{why}: {group}."
        decisions.append(Decision.of("fit", "groups", str(number), text, _numbers(facts, found)))
        return found
    return None


def _numbers(facts: PlanFacts, found: Candidate) -> dict[str, Number]:
    return {
        "devices": len(facts.devices), "group_size": found.layout.shards, "moved_bytes": found.moved, "gathered_bytes": found.gathered,
    }  # fmt: skip


def _weighed(
    plan: Plan, facts: PlanFacts, given: Layout, night: Night, alone: Candidate | None, decisions: list[Decision], whole: str
) -> Candidate | None:
    """Replicas that stream their dit against groups that hold it: by predicted time, else by bytes moved."""
    obstacle = _no_group(plan, facts, given, alone) or whole or None
    if obstacle is not None:
        if alone is not None:
            text = f"{len(facts.devices)} replicas, nothing sharded: {obstacle}."
            decisions.append(Decision.of(RULE, "replicas", str(len(facts.devices)), text, _numbers(facts, alone)))
        return alone
    modes = dict(given.modes)
    for name in modes:
        if is_dit(name):
            modes[name] = "fsdp"
        elif is_dit_helper(name) and plan.placement(name).by != "user":
            modes[name] = "resident"
    said: list[Decision] = []
    grouped = _smallest_group(plan, facts, replace(given, modes=modes), night, said, automatic=True)
    if grouped is None:
        if alone is not None:
            text = f"The dit would not fit sharded over {max(sizes_to_try(facts))} devices either: each replica streams it."
            decisions.append(Decision.of(RULE, "fsdp", "no", text, _numbers(facts, alone)))
        return alone
    if alone is None:
        decisions += said
        return grouped
    replicas, groups = _Use(alone, len(facts.devices)), _Use(grouped, len(facts.devices))
    decision, chosen = _compared(facts, night, replicas, groups)
    decisions += [decision] if chosen is alone else [decision, *said]
    return chosen


def _no_group(plan: Plan, facts: PlanFacts, given: Layout, alone: Candidate | None) -> str | None:
    """Why groups are not looked at."""
    names = [name for name in given.modes if is_dit(name) and given.part(name).weights_bytes]  # those that are loaded
    if facts.overrides.fsdp is False:
        return "--no-fsdp says so"
    if alone is not None and not any(alone.layout.mode(name) == "layerwise-offload" for name in names):
        return "a replica fits on each device without streaming its dit, and jobs share nothing"
    if not names or not all(given.part(name).block_bytes for name in names):
        return "the model has no dit with repeated blocks"
    if any(plan.placement(name).by == "user" for name in names):
        return "the user placed the dit"
    if max(sizes_to_try(facts)) < 2:
        return "no two devices are on one machine"
    return None


def _compared(facts: PlanFacts, night: Night, replicas: _Use, groups: _Use) -> tuple[Decision, Candidate]:
    one, other = replicas.seconds(night), groups.seconds(night)
    numbers = _numbers(facts, groups.found) | {
        "replica_seconds": one, "group_seconds": other, "replica_traffic_bytes": replicas.traffic, "group_traffic_bytes": groups.traffic,
    }  # fmt: skip
    grouped = groups_text(groups.replicas, groups.found.layout.shards)
    what = (f"{replicas.replicas} replicas that stream the dit", f"{grouped} that shard it")
    if one is not None and other is not None:
        sharded = other < CLEARLY * one
        text = f"{what[0]}: {duration_text(one)} predicted; {what[1]}: {duration_text(other)}"
    else:
        sharded = groups.traffic < CLEARLY * replicas.traffic
        text = f"{what[0]} move {size_text(replicas.traffic)}; {what[1]} move {size_text(groups.traffic)}"
    verdict = "it is sharded" if sharded else "replicas, since jobs share nothing"
    decision = Decision.of(RULE, "fsdp", "yes" if sharded else "no", f"{text}: {verdict}.", numbers)
    return decision, groups.found if sharded else replicas.found
