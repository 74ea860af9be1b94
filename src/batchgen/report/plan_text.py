"""A plan's head in plain lines. Without rich, which costs as much time as the plan itself."""

from __future__ import annotations

from batchgen.plan.records import Plan


def plain(text: str) -> str:
    """One line without control characters: names come from files and must not move the cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


def summary_lines(plan: Plan) -> list[str]:
    """The plan's head in plain lines: model, devices, threshold, how several devices are used."""
    counts: dict[tuple[str, float, float], int] = {}
    for device in plan.devices:
        key = (device.name, device.total_gb, device.available_gb)
        counts[key] = counts.get(key, 0) + 1
    cards = [
        f"{count} × {plain(name)}, {total:.1f} GiB, {available:.1f} available" for (name, total, available), count in counts.items()
    ]
    limit = "never" if plan.threshold_gb is None else f"{plan.threshold_gb:g} GiB"
    several = ""
    if plan.fsdp:
        each = "one group" if plan.replicas == 1 else f"{plan.replicas} groups"
        several = f"; {each} of {plan.group_size} devices with a sharded dit"
        several += ", guidance's branches in parallel" if plan.cfg_parallel else ""
    elif plan.replicas > 1:
        several = f"; {plan.replicas} replicas, one a device"
    return [
        f"{plain(plan.model)}, profile {plain(plan.profile)}, {plan.performance_mode} mode",
        f"{plan.platform}: {'; '.join(cards)}",
        f"keep-resident threshold: {limit} ({plan.threshold_source}){several}",
    ]
