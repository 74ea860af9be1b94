"""Guidance's two branches at once: one half of a group's ranks runs the conditional one, the other half the other, and they exchange.

Carried out at the guider, so that it holds for every family whose stages ask one which inputs to run. Where only one branch is due
(guidance off, or outside its range of steps) all ranks run that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.guiders import ClassifierFreeGuidance

from batchgen.execute.group import RankGroup
from batchgen.execute.guidance import RowGuidance


class SplitBranches:
    """Mixed into a guider: of two prepared inputs this rank runs its own, and takes the other's prediction from its partner."""

    link: RankGroup
    num_conditions: int

    def prepare_inputs(self, data: Any) -> list[Any]:
        return self._mine(super().prepare_inputs(data))  # type: ignore[misc]

    def prepare_inputs_from_block_state(self, data: Any, input_fields: Any) -> list[Any]:
        return self._mine(super().prepare_inputs_from_block_state(data, input_fields))  # type: ignore[misc]

    def _mine(self, batches: list[Any]) -> list[Any]:
        return [batches[self.link.branch]] if len(batches) == 2 else batches

    def prepare_models(self, denoiser: Any) -> None:
        own: Any = self
        if self.num_conditions == 2 and self.link.branch == 1:
            own._count_prepared += 1  # the conditional branch, which runs elsewhere
        super().prepare_models(denoiser)  # type: ignore[misc]

    def __call__(self, data: list[Any]) -> Any:
        if self.num_conditions == 2 and len(data) == 1:
            conditional, other = self.link.exchange(data[0].noise_pred)
            return self.forward(conditional, other)  # type: ignore[attr-defined]
        return super().__call__(data)  # type: ignore[misc]


def can_split(guider: Any) -> bool:
    """The stock guider and the one with a scale for every row: two branches that know nothing of each other."""
    return type(guider) in (ClassifierFreeGuidance, RowGuidance)


def split_branches(guiders: Mapping[str, Any], link: RankGroup) -> dict[str, Any]:
    """The same guiders, running this rank's branch. Those of another kind are left alone."""
    for guider in guiders.values():
        if can_split(guider):
            guider.__class__ = type(type(guider).__name__, (SplitBranches, type(guider)), {})
            guider.link = link
    return dict(guiders)
