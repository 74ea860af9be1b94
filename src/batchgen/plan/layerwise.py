"""Rules: what streams block by block without being asked to, on CUDA in auto and memory mode."""

from __future__ import annotations

from batchgen.plan import selectors
from batchgen.plan.draft import Draft, change, chosen_dits, dits, reaches
from batchgen.plan.records import DecidedBy, PlanFacts
from batchgen.plan.trail import Decision, Number
from batchgen.units import size_text

DEFAULTS = "layerwise-defaults"
DIT = "layerwise-dit"


def layerwise_defaults(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Encoders and VAE stream unless the user chose what streams, or (auto) the profile keeps their group at this much memory."""
    option, mode = draft.streaming_option, facts.overrides.performance_mode
    on = option is None
    text = "Text encoders, image encoders and VAEs stream by default." if on else f"{option} was given, so nothing else streams by default."
    # `none` asks for less streaming, not for more saving: only the VAE, which base offload never takes, is kept off the device then.
    only_vae = selectors.items(facts.overrides.layerwise_offload_components) == ("none",)
    asked = [
        name for name in draft.unset(facts)
        if selectors.streams_by_default(name) and (selectors.in_group(name, "vae") or not only_vae)
    ]  # fmt: skip
    decisions = [Decision.of(DEFAULTS, "plan", "yes" if on else "no", text, {"option": option, "components": len(asked)})]
    enough = mode == "auto" and reaches(facts.available_gb, draft.threshold.gb)
    for name in asked:
        kept = selectors.group_of(name) in facts.profile.keep_resident_components
        numbers: dict[str, Number] = {
            "performance_mode": mode, "available_gb": facts.available_gb, "threshold_gb": draft.threshold.gb, "profile_keeps": kept,
        }  # fmt: skip
        choose = _stream_or_not if on else _offload_or_not
        draft, decision = choose(facts, draft, name, enough and kept, numbers)
        decisions.append(decision)
    return draft, tuple(decisions)


def _stream_or_not(facts: PlanFacts, draft: Draft, name: str, kept: bool, numbers: dict[str, Number]) -> tuple[Draft, Decision]:
    if kept:
        enough = f"{facts.available_gb:.1f} GiB free reaches {draft.threshold.text}"
        text = f"{name} does not stream: profile {facts.profile.name} keeps it, and {enough}."
        return draft, change(DEFAULTS, name, draft, "unchanged", text, numbers)
    by: DecidedBy = "default"
    why = f"{selectors.group_of(name)} streams by default, and profile {facts.profile.name} does not keep it"
    if facts.overrides.performance_mode != "auto":
        why = f"{selectors.group_of(name)} streams by default, and memory mode keeps nothing"
    elif numbers["profile_keeps"]:
        by = draft.threshold.source
        why = f"{facts.available_gb:.1f} GiB free is below {draft.threshold.text}, so it streams"
    decision = change(DEFAULTS, name, draft, "layerwise-offload", f"{name} is streamed: {why}.", numbers)
    return draft.place(name, "layerwise-offload", by, why), decision


def _offload_or_not(facts: PlanFacts, draft: Draft, name: str, kept: bool, numbers: dict[str, Number]) -> tuple[Draft, Decision]:
    """Asking to stream one part must not leave on the device what would have streamed by default: asking to save more never saves less."""
    if kept:
        text = f"{name} stays: profile {facts.profile.name} keeps it, and there is enough memory by {draft.threshold.text}."
        return draft, change(DEFAULTS, name, draft, "unchanged", text, numbers)
    why = f"{draft.streaming_option} switched its streaming off, and it is not to stay on the device instead"
    decision = change(DEFAULTS, name, draft, "component-offload", f"{name} is component-offload: {why}.", numbers)
    return draft.place(name, "component-offload", "default", why), decision


def layerwise_dit(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """The dit streams too where the profile says so for this mode, or (auto) where it overflows the device and the profile lets it."""
    profile, mode, names = facts.profile, facts.overrides.performance_mode, dits(facts)
    sizes = [facts.model.component(name).bytes_as_loaded for name in names]
    known = [size for size in sizes if size is not None]
    available = min(device.available_bytes for device in facts.devices)
    numbers: dict[str, Number] = {
        "dits": len(names), "chosen_dits": chosen_dits(facts, draft), "fsdp": draft.fsdp, "option": draft.streaming_option,
        "performance_mode": mode, "profile_modes": ",".join(profile.dit_layerwise_offload_modes),
        "available_gb": facts.available_gb, "threshold_gb": draft.threshold.gb,
        "unknown_sizes": len(sizes) - len(known), "largest_dit_bytes": max(known, default=None), "available_bytes": available,
        "fraction": "4/5",
    }  # fmt: skip
    free = bool(names) and not numbers["chosen_dits"] and not draft.fsdp and draft.streaming_option is None
    listed = mode in profile.dit_layerwise_offload_modes
    # Whole numbers: a dit of exactly 0.8 × available does not stream.
    overflows = len(known) == len(sizes) and bool(known) and max(known) * 5 > available * 4
    may = mode == "auto" and "memory" in profile.dit_layerwise_offload_modes and not reaches(facts.available_gb, draft.threshold.gb)
    if not (free and (listed or (may and overflows))):
        return draft, (Decision.of(DIT, "dit", "no", _why_not(facts, draft, numbers, free=free, may=may), numbers),)
    by: DecidedBy = "model" if listed else "size"
    if listed:
        why = f"profile {profile.name} streams its dit in {mode} mode"
    else:
        why = f"the largest dit, {size_text(max(known))}, is more than 0.8 × {size_text(available)} free"
    decisions = [Decision.of(DIT, "dit", "yes", f"The dit streams: {why}.", numbers)]
    for name in names:
        decisions.append(change(DIT, name, draft, "layerwise-offload", f"{name} is streamed: {why}."))
        draft = draft.place(name, "layerwise-offload", by, why)
    return draft, tuple(decisions)


def _why_not(facts: PlanFacts, draft: Draft, numbers: dict[str, Number], *, free: bool, may: bool) -> str:
    if not numbers["dits"]:
        why = "the model has none"
    elif draft.streaming_option is not None:
        why = f"{draft.streaming_option} says what streams"
    elif draft.fsdp:
        why = "it is sharded"
    elif not free:
        why = f"{numbers['chosen_dits']} of {numbers['dits']} dits were placed by the user"
    elif not may:
        modes = numbers["profile_modes"] or "no mode"
        why = f"profile {facts.profile.name} streams it in {modes}"
        if "memory" in facts.profile.dit_layerwise_offload_modes:
            why += f", and {facts.available_gb:.1f} GiB free reaches {draft.threshold.text}"
    elif numbers["unknown_sizes"]:
        why = "its size is unknown, so nothing says that it overflows"
    else:
        largest, available = numbers["largest_dit_bytes"], numbers["available_bytes"]
        assert isinstance(largest, int)
        assert isinstance(available, int)
        why = f"the largest, {size_text(largest)}, is not more than 0.8 × {size_text(available)} free"
    return f"The dit does not stream by itself: {why}."
