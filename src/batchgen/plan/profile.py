"""Rule: which deployment profile speaks for the model. It places nothing; the rules after it read its numbers."""

from __future__ import annotations

from batchgen.plan.draft import Draft
from batchgen.plan.records import PlanFacts
from batchgen.plan.trail import Decision


def profile(facts: PlanFacts, draft: Draft) -> tuple[Draft, tuple[Decision, ...]]:
    """Says the profile's name and how it was found, so that a wrong one is noticed."""
    found = facts.profile
    how = found.matched or "given by the caller"
    text = f"Profile {found.name} speaks for this model: {how}."
    return draft, (Decision.of("profile", "profile", found.name, text, {"name": found.name, "matched": how, "task": found.task}),)
