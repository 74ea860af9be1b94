"""The plan while the rules work on it: one frozen record that each rule replaces.

A rule is a function `(PlanFacts, Draft) -> (Draft, decisions)`. It never looks at the trail, only at facts and draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from batchgen.plan import selectors
from batchgen.plan.records import DecidedBy, Mode, PlanFacts, ThresholdSource
from batchgen.plan.trail import Decision, Number
from batchgen.units import GIB


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement that the user asked for, and by what: `--component-residency` and `dit=resident`, say."""

    mode: Mode
    option: str
    item: str  # the part of the option that named the component; "" for a flag

    @property
    def text(self) -> str:
        return f"{self.option} {self.item}".strip()


@dataclass(frozen=True, slots=True)
class Spot:
    """Where one component stands so far."""

    mode: Mode
    by: DecidedBy
    reason: str


@dataclass(frozen=True, slots=True)
class Threshold:
    """Free memory from which components are kept on the device. `gb` None: never."""

    gb: float | None
    source: ThresholdSource

    @property
    def text(self) -> str:
        owner = {"user": "your", "model": "the profile's", "task": "the image task's", "global": "the global"}[self.source]
        return f"{owner} threshold" + (" (never)" if self.gb is None else f" of {self.gb:g} GiB")


@dataclass(frozen=True, slots=True)
class Draft:
    """What is decided so far. `spots` may lack components until the mode's first rule has placed them."""

    threshold: Threshold
    choices: Mapping[str, Choice] = field(default_factory=dict)
    spots: Mapping[str, Spot] = field(default_factory=dict)
    streaming_option: str | None = None  # the option that switches the layerwise defaults off
    fsdp: bool = False
    replicas: int = 1
    group_size: int = 1
    cfg_parallel: bool = False

    def place(self, name: str, mode: Mode, by: DecidedBy, reason: str) -> Draft:
        return replace(self, spots={**self.spots, name: Spot(mode, by, reason)})

    def mode(self, name: str) -> Mode | None:
        spot = self.spots.get(name)
        return spot.mode if spot else None

    def unset(self, facts: PlanFacts) -> tuple[str, ...]:
        """Components the rules may still place: neither chosen by the user nor sharded."""
        return tuple(name for name in component_names(facts) if name not in self.choices and self.mode(name) != "fsdp")


Rule = Callable[[PlanFacts, Draft], tuple[Draft, tuple[Decision, ...]]]


def component_names(facts: PlanFacts) -> tuple[str, ...]:
    return tuple(part.name for part in facts.model.components)


def dits(facts: PlanFacts) -> tuple[str, ...]:
    return tuple(filter(selectors.is_dit, component_names(facts)))


def chosen_dits(facts: PlanFacts, draft: Draft) -> int:
    return sum(name in draft.choices for name in dits(facts))


def role(name: str) -> str | None:
    """The group of a component, `dit helper` for what works beside the dit, None for neither."""
    return selectors.group_of(name) or ("dit helper" if selectors.is_dit_helper(name) else None)


def reaches(available_gb: float, threshold_gb: float | None) -> bool:
    """Whether memory reaches a threshold, both in GiB, compared in whole bytes. None is never reached."""
    return threshold_gb is not None and round(available_gb * GIB) >= round(threshold_gb * GIB)


def names_text(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names) if names else "nothing"


def change(rule: str, name: str, draft: Draft, mode: str, text: str, numbers: Mapping[str, Number] | None = None) -> Decision:
    """The Decision that gives a component a placement; `was` links it to the one before."""
    return Decision.of(rule, name, mode, text, {"was": draft.mode(name), "role": role(name), **(numbers or {})})
