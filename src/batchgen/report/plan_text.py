"""A plan's head in plain lines. Without rich, which costs as much time as the plan itself."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.jobs import ShapeKey
from batchgen.plan.records import Plan
from batchgen.units import counted, size_text


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


_SHAPES_SAID = 6


def jobs_line(counts: Sequence[tuple[ShapeKey, int]], *, assumed: bool = False) -> str:
    """`1,632 jobs of 2 shapes: 1,600 at 1024x1024, 50 steps; 32 at 512x512, 50 steps`, the commonest first."""
    jobs = sum(count for _, count in counts)
    note = " (assumed; a manifest or --jobs says how many)" if assumed else ""
    shapes = sorted(counts, key=lambda entry: -entry[1])
    texts = [shape.text.replace("?x?", "the model's own size") for shape, _ in shapes[:_SHAPES_SAID]]
    if len(shapes) == 1:
        return f"{counted(jobs, 'job')}{note} at {plain(texts[0])}"
    said = [f"{count:,} at {plain(text)}" for text, (_, count) in zip(texts, shapes, strict=False)]
    if len(shapes) > _SHAPES_SAID:
        said.append(f"{sum(count for _, count in shapes[_SHAPES_SAID:]):,} of {counted(len(shapes) - _SHAPES_SAID, 'other shape')}")
    return f"{counted(jobs, 'job')}{note} of {counted(len(shapes), 'shape')}: {'; '.join(said)}"


def too_large(plan: Plan, *, unfitted_by: str | None = None) -> str | None:
    """A warning where the weights that stay on a device are alone larger than what is free there; for plans that nothing was fitted to.

    `unfitted_by`: the option that kept the plan from being fitted, where the user gave one.
    """
    staying = [spot for spot in plan.placements if spot.mode == "resident" and spot.bytes]
    needed = sum(spot.bytes or 0 for spot in staying)
    available = min(device.available_bytes for device in plan.devices)
    if needed <= available:
        return None
    said = f"resident weights alone are {size_text(needed)}, and {plan.devices[0].name} has {size_text(available)} available"
    if plan.platform == "cpu":  # weights are in the host's memory already: they can go nowhere else
        return f"{said}: this would not fit. It needs a machine with more memory, or a smaller model or --dtype"
    largest = max(staying, key=lambda spot: spot.bytes or 0)
    fitting = f"Without {unfitted_by}" if unfitted_by is not None else "With --rehearse"
    return (
        f"{said}: this would not fit. {fitting} the plan is made to fit; or try "
        f"--component-residency {largest.component}=layerwise-offload"
    )
