"""Rules: the threshold, and what it keeps on the device after offload was decided; and the twice-over rule."""

from __future__ import annotations

from dataclasses import replace

from batchgen.plan import selectors
from batchgen.plan.draft import Draft, Threshold, change, component_names, names_text, reaches
from batchgen.plan.records import PlanFacts
from batchgen.plan.trail import Decision, Number
from batchgen.units import size_text

TASK_THRESHOLD_GB = {"image": 45.0}
GLOBAL_THRESHOLD_GB = 120.0
KEEP = "keep-resident"
TWICE = "twice-over"


def find_threshold(facts: PlanFacts) -> Threshold:
    """The first that is set: the user's option, the profile's own, the task's default, the global default."""
    user, model = facts.overrides.keep_resident_min_available_gb, facts.profile.keep_resident_min_available_gb
    task = TASK_THRESHOLD_GB.get(facts.profile.task)
    if user is not None:
        return Threshold(None if user == "never" else float(user), "user")
    if model is not None:
        return Threshold(None if model == "never" else float(model), "model")
    if task is not None:
        return Threshold(task, "task")
    return Threshold(GLOBAL_THRESHOLD_GB, "global")


def threshold(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Says which threshold holds; every later rule reads it from the draft."""
    found = find_threshold(facts)
    numbers: dict[str, Number] = {
        "user_gb": facts.overrides.keep_resident_min_available_gb, "model_gb": facts.profile.keep_resident_min_available_gb,
        "task_gb": TASK_THRESHOLD_GB.get(facts.profile.task), "global_gb": GLOBAL_THRESHOLD_GB,
    }  # fmt: skip
    decision = "never" if found.gb is None else f"{found.gb:g}"
    text = f"{found.text[0].upper()}{found.text[1:]} holds."
    return replace(draft, threshold=found), (Decision.of("threshold", "threshold", decision, text, numbers),)


def kept_groups(facts: PlanFacts) -> tuple[str, ...]:
    """Groups that the threshold keeps: the profile's, and for an image task the dit."""
    return tuple(dict.fromkeys((*facts.profile.keep_resident_components, *(("dit",) if facts.profile.task == "image" else ()))))


def keep_by_threshold(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """With enough free memory, unset components of the kept groups come back to the device; keeping the dit keeps its helpers."""
    limit, groups = draft.threshold, kept_groups(facts)
    enough = reaches(facts.available_gb, limit.gb)
    numbers: dict[str, Number] = {"available_gb": facts.available_gb, "threshold_gb": limit.gb, "groups": ",".join(groups)}
    verb = "reaches" if enough else "is below"
    fact = f"{facts.available_gb:.1f} GiB free {verb} {limit.text}"
    then = f"{names_text(groups)} {'stay' if enough else 'are not kept'}" + (" on the device" if enough else "")
    decisions = [Decision.of(KEEP, "plan", "yes" if enough else "no", f"{fact}: {then}.", numbers)]
    for name in draft.unset(facts):
        spot = draft.spots[name]
        if selectors.group_of(name) not in groups and not (selectors.is_dit_helper(name) and "dit" in groups):
            continue
        if enough:
            decisions.append(change(KEEP, name, draft, "resident", f"{name} is kept on the device.", {"source": limit.source}))
            draft = draft.place(name, "resident", limit.source, f"{fact}, so it is kept on the device")
        elif spot.mode != "resident" and spot.by == "default":
            text = f"{name} stays {spot.mode}: the threshold is not reached."
            decisions.append(change(KEEP, name, draft, spot.mode, text, {"source": limit.source}))
            draft = draft.place(name, spot.mode, limit.source, f"{fact}, so it is not kept on the device")
    return draft, tuple(decisions)


def twice_over(facts: PlanFacts) -> tuple[int | None, bool]:
    """Bytes of all weights as loaded (None if one is unknown), and whether they fit twice into the least free memory."""
    sizes = [part.bytes_as_loaded for part in facts.model.components]
    total = sum(size for size in sizes if size is not None)
    if any(size is None for size in sizes):
        return None, False
    return total, 2 * total <= min(device.available_bytes for device in facts.devices)


def keep_all_twice_over(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Weights that fit twice over leave room for whatever a batch needs: everything unset is resident, whatever the threshold."""
    total, fits = twice_over(facts)
    available = min(device.available_bytes for device in facts.devices)
    unknown = [part.name for part in facts.model.components if part.bytes_as_loaded is None]
    numbers: dict[str, Number] = {"weights_bytes": total, "available_bytes": available, "unknown_sizes": len(unknown)}
    if unknown:
        fact = f"The size of {names_text(unknown)} is unknown" if len(unknown) < len(component_names(facts)) else "No size is known"
    else:
        fact = f"All weights, {size_text(total)}, {'fit' if fits else 'do not fit'} twice into {size_text(available)} free"
    tail = "everything unset is resident" if fits else "the twice-over rule keeps nothing"
    decisions = [Decision.of(TWICE, "plan", "yes" if fits else "no", f"{fact}: {tail}.", numbers)]
    for name in draft.unset(facts) if fits else ():
        if draft.mode(name) != "resident":
            since: dict[str, Number] = {"was_by": draft.spots[name].by}
            decisions.append(change(TWICE, name, draft, "resident", f"{name} is kept on the device.", since))
            draft = draft.place(name, "resident", "size", f"all weights, {size_text(total)}, fit twice into {size_text(available)} free")
    return draft, tuple(decisions)
