"""Rules: where unset components start. Base offload (auto, memory), all resident (manual, speed, CPU, MPS), and memory mode's rest."""

from __future__ import annotations

from batchgen.plan import selectors
from batchgen.plan.draft import Draft, change, names_text, reaches, role
from batchgen.plan.records import Mode, PlanFacts
from batchgen.plan.trail import Decision

SMALL_CARD_GB = 30.0


def base_offload(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Unset components of the groups that a card of this size offloads start off the device, the others on it."""
    total = facts.total_gb
    small = not reaches(total, SMALL_CARD_GB)
    groups = ["text_encoder"] if draft.fsdp else ["dit", "text_encoder"]
    if small or facts.profile.task != "image":
        groups.append("image_encoder")
    size = f"{total:.1f} GiB is {'under' if small else 'at least'} {SMALL_CARD_GB:g}"
    because = f"{size}, so base offload covers {names_text(groups)}"
    numbers = {"total_gb": total, "small_card_gb": SMALL_CARD_GB, "task": facts.profile.task, "fsdp": draft.fsdp}
    text = f"The least total memory, {size}, and the task is {facts.profile.task}: base offload covers {names_text(groups)}."
    decisions = [Decision.of("base-offload", "plan", ",".join(groups), text, numbers)]
    for name in draft.unset(facts):
        covered = selectors.group_of(name) in groups or (selectors.is_dit_helper(name) and "dit" in groups)
        mode: Mode = "component-offload" if covered else "resident"
        reason = because if covered else f"base offload covers {names_text(groups)} and leaves it on the device"
        text = f"{name} is {f'of {role(name)}' if role(name) else 'in no group'}: it starts {mode}."
        decisions.append(change("base-offload", name, draft, mode, text))
        draft = draft.place(name, mode, "default", reason)
    return draft, tuple(decisions)


def unset_resident(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Everything unset stays on the device: manual and speed mode, and the platforms without automatic steps."""
    mode = facts.overrides.performance_mode
    reason = {
        "cpu": "on the CPU weights have nowhere else to go, so no automatic step is taken",
        "mps": "on mps device and host share one memory, so no automatic step is taken",
        "cuda": f"{mode} mode keeps what is not named on the device",
    }[facts.platform]
    numbers = {"platform": facts.platform, "performance_mode": mode}
    text = f"{reason[0].upper()}{reason[1:]}: everything unset is resident."
    decisions = [Decision.of("unset-resident", "plan", "resident", text, numbers)]
    for name in draft.unset(facts):
        decisions.append(change("unset-resident", name, draft, "resident", f"{name} is unset, so it is resident."))
        draft = draft.place(name, "resident", "default", reason)
    return draft, tuple(decisions)


def memory_rest(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Memory mode leaves nothing unset on the device, not even parts that no group knows."""
    decisions = []
    for name in draft.unset(facts):
        if draft.mode(name) == "resident":
            text = f"{name} is unset and memory mode leaves nothing on the device: component-offload."
            decisions.append(change("memory-mode", name, draft, "component-offload", text))
            draft = draft.place(name, "component-offload", "default", "memory mode leaves nothing that is unset on the device")
    return draft, tuple(decisions)
