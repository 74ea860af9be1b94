"""Rule: what the user asked for, component by component. It comes first, and no later rule may touch what it binds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from batchgen.errors import UsageError
from batchgen.plan import selectors
from batchgen.plan.draft import Choice, Draft, change, component_names
from batchgen.plan.records import Mode, Overrides, PlanFacts
from batchgen.plan.selectors import Selection
from batchgen.plan.trail import Decision

CHOOSABLE: tuple[Mode, ...] = ("resident", "component-offload", "layerwise-offload")
RULE = "explicit"


def explicit_placements(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Binds every component that an option names. Raises UsageError for a name, mode or combination that cannot be."""
    overrides, names = facts.overrides, component_names(facts)
    residency = selectors.residency_items(overrides.component_residency, names, CHOOSABLE)
    streamed = selectors.layerwise_selection(overrides.layerwise_offload_components, names)
    offloaded = selectors.cpu_selection(overrides.cpu_offload_components, names)
    _refuse_selector_with_flags(offloaded, overrides)
    if facts.platform == "mps":
        _refuse_on_shared_memory(overrides, residency, streamed, offloaded)
    decisions = []
    choices: dict[str, Choice] = {}
    for name in names:
        choice = _choice(name, overrides, residency, streamed, offloaded)
        if choice is None:
            continue
        choices[name] = choice
        numbers = {"option": choice.option, "item": choice.item}
        decisions.append(change(RULE, name, draft, choice.mode, f"{name} is {choice.mode}: asked for by {choice.text}.", numbers))
        draft = draft.place(name, choice.mode, "user", f"asked for by {choice.text}")
    decisions += _without_effect(overrides, residency, streamed, offloaded, choices)
    streaming = streamed.option if streamed.given else "--dit-layerwise-offload" if overrides.dit_layerwise_offload else None
    return replace(draft, choices=choices, streaming_option=streaming), tuple(decisions)


def _choice(name: str, overrides: Overrides, residency: Mapping[str, str], streamed: Selection, offloaded: Selection) -> Choice | None:
    """The first of the options, in their order of precedence, that binds this component."""
    key = selectors.residency_match(residency, name)
    if key is not None:
        mode = next(mode for mode in CHOOSABLE if mode == residency[key])
        return Choice(mode, "--component-residency", f"{key}={mode}")
    item = selectors.layerwise_match(streamed, name)
    if item is not None:
        return Choice("layerwise-offload", streamed.option, item)
    if overrides.dit_layerwise_offload and selectors.is_dit(name):
        return Choice("layerwise-offload", "--dit-layerwise-offload", "")
    item = selectors.cpu_match(offloaded, name)
    if item is not None:
        return Choice("resident" if item == "none" else "component-offload", offloaded.option, item)
    for group, flag in cpu_flags(overrides).items():
        if flag is not None and selectors.cpu_takes(group, name):
            return Choice("component-offload" if flag else "resident", flag_name(group, flag), "")
    if overrides.dit_layerwise_offload is False and selectors.cpu_takes("dit", name):
        return Choice("resident", "--no-dit-layerwise-offload", "")
    return None


def cpu_flags(overrides: Overrides) -> dict[str, bool | None]:
    """The CPU flag of each group, in the table's order."""
    return {
        "dit": overrides.dit_cpu_offload,
        "text_encoder": overrides.text_encoder_cpu_offload,
        "image_encoder": overrides.image_encoder_cpu_offload,
        "vae": overrides.vae_cpu_offload,
    }


def flag_name(group: str, on: bool) -> str:
    return f"--{'' if on else 'no-'}{group.replace('_', '-')}-cpu-offload"


def _refuse_selector_with_flags(offloaded: Selection, overrides: Overrides) -> None:
    flags = [flag_name(group, flag) for group, flag in cpu_flags(overrides).items() if flag is not None]
    if offloaded.given and flags:
        raise UsageError(
            f"{offloaded.option} cannot stand beside {', '.join(flags)}: both say where the same components live",
            option=offloaded.option,
            hint=f"Put the components into {offloaded.option}, or use the flags alone.",
        )


def _refuse_on_shared_memory(overrides: Overrides, residency: Mapping[str, str], streamed: Selection, offloaded: Selection) -> None:
    asked = [f"--component-residency {name}={mode}" for name, mode in residency.items() if mode != "resident"]
    asked += [f"{lst.option} {','.join(lst.items)}" for lst in (streamed, offloaded) if lst.given and not lst.is_none]
    asked += [flag_name(group, True) for group, flag in cpu_flags(overrides).items() if flag]
    asked += ["--dit-layerwise-offload"] if overrides.dit_layerwise_offload else []
    if asked:
        raise UsageError(
            f"{'; '.join(asked)}: on mps the device and the host share one memory, so offloading would move nothing and save nothing",
            option=asked[0].split()[0],
            hint="Leave the option out: on mps every component stays where it is loaded.",
        )


def _without_effect(
    overrides: Overrides, residency: Mapping[str, str], streamed: Selection, offloaded: Selection, choices: Mapping[str, Choice]
) -> list[Decision]:
    """What was asked for and binds nothing: said once, so that nobody waits for it to work."""
    asked = [("--component-residency", f"{name}={mode}") for name, mode in residency.items()]
    asked += [(lst.option, item) for lst in (streamed, offloaded) for item in lst.items if not (lst is streamed and item == "none")]
    asked += [("--dit-layerwise-offload" if overrides.dit_layerwise_offload else "--no-dit-layerwise-offload", "")] * (
        overrides.dit_layerwise_offload is not None
    )
    asked += [(flag_name(group, flag), "") for group, flag in cpu_flags(overrides).items() if flag is not None]
    bound = {(choice.option, choice.item) for choice in choices.values()}
    return [
        Decision.of(
            RULE, f"{option} {item}".strip(), "binds nothing",
            f"{f'{option} {item}'.strip()} binds nothing: the model has no such component, or a stronger option binds it.",
            {"option": option, "item": item, "bound": 0},
        )
        for option, item in asked if (option, item) not in bound
    ]  # fmt: skip
