"""A plan's head in plain lines. Without rich, which costs as much time as the plan itself."""

from __future__ import annotations

from batchgen.plan.records import Plan
from batchgen.units import size_text


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


def too_large(plan: Plan) -> str | None:
    """A warning where the weights that stay on a device are alone larger than what is free there; for plans that nothing was fitted to."""
    staying = [spot for spot in plan.placements if spot.mode == "resident" and spot.bytes]
    needed = sum(spot.bytes or 0 for spot in staying)
    available = min(device.available_bytes for device in plan.devices)
    if needed <= available:
        return None
    largest = max(staying, key=lambda spot: spot.bytes or 0)
    return (
        f"resident weights alone are {size_text(needed)}, and {plan.devices[0].name} has {size_text(available)} available: this would not "
        f"fit. Without --policy-only the plan is made to fit; or try --component-residency {largest.component}=layerwise-offload"
    )
