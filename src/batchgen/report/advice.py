"""What the next run could do better, from what this one measured: offloaded components that would have fitted beside everything else.

Pure. Says nothing where the device's peak was not measured, or where memory ran out.
"""

from __future__ import annotations

from batchgen.plan.records import Placement, Plan
from batchgen.report.summary import Summary
from batchgen.units import MIB, size_text

MARGIN = 0.05  # of what was available: fragments, and prompts longer than this list's
LEAST_MARGIN_BYTES = 512 * MIB


def advice(summary: Summary, plan: Plan) -> list[str]:
    """Sentences, the option last. Empty where there is nothing to gain."""
    if not summary.stage_peaks or not any(summary.stage_peaks.values()) or not summary.stage_components:
        return []
    if plan.fsdp or any(step.rule == "out-of-memory" for step in summary.decisions):
        return []
    available = min(device.available_bytes for device in plan.devices)
    limit = available - max(LEAST_MARGIN_BYTES, int(MARGIN * available))
    peaks = dict(summary.stage_peaks)
    found: list[tuple[Placement, int]] = []
    for placement in _offloaded(summary, plan):
        size = placement.bytes
        assert size is not None
        raised = {stage: peak + _more_in(stage, placement, size, summary) for stage, peak in peaks.items()}
        if max(raised.values()) <= limit:
            peaks = raised
            found.append((placement, summary.components[placement.component].moved_bytes))
    if not found:
        return []
    lines = [
        f"{placement.component} could have stayed resident: with it the highest stage needs {size_text(max(peaks.values()))} of "
        f"{size_text(available)} available" + (f", and {size_text(moved)} less would have moved" if moved else "")
        for placement, moved in found
    ]
    wish = ",".join(f"{placement.component}=resident" for placement, _ in found)
    return [*lines, f"next time: --component-residency {wish}"]


def _offloaded(summary: Summary, plan: Plan) -> list[Placement]:
    """Components that moved and whose size is known, those called most often for their size first."""
    moved = []
    for placement in plan.placements:
        use = summary.components.get(placement.component)
        if use is not None and placement.bytes and (use.placement or placement.mode) in ("component-offload", "layerwise-offload"):
            moved.append((use.calls / placement.bytes, placement))
    return [placement for _, placement in sorted(moved, key=lambda item: -item[0])]


def _more_in(stage: str, placement: Placement, size: int, summary: Summary) -> int:
    """Bytes that a stage's peak would grow by: nothing where the component is in as a whole already."""
    whole = summary.components[placement.component].placement == "component-offload"
    return 0 if whole and placement.component in summary.stage_components.get(stage, ()) else size
