"""The decision trail: every rule says what it decided, about what, and with which numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Number = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, a "no" included. `numbers` holds every value that was compared, by name."""

    rule: str  # "base-offload", "layerwise-default", "fsdp", "keep-resident", "fit", ...
    subject: str  # a component, a group, "threshold", "plan", a stage
    decision: str  # a placement, "yes", "no", or a value
    text: str  # one plain sentence with the numbers
    numbers: tuple[tuple[str, Number], ...] = ()

    @classmethod
    def of(cls, rule: str, subject: str, decision: str, text: str, numbers: Mapping[str, Number] | None = None) -> Decision:
        return cls(rule, subject, decision, text, tuple((numbers or {}).items()))


@dataclass(frozen=True, slots=True)
class Trail:
    """Decisions in the order they were made."""

    decisions: tuple[Decision, ...] = field(default=())

    def add(self, decisions: Iterable[Decision]) -> Trail:
        return Trail((*self.decisions, *decisions))

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def about(self, subject: str) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.subject == subject)
