"""How a plan uses several devices, for people: sharded or not, replicas or groups, guidance's branches, what each device more brings."""

from __future__ import annotations

from batchgen.plan.records import Plan
from batchgen.plan.scaling import rate_text
from batchgen.plan.several import groups_text
from batchgen.report.sheet import Column, Sheet

# What is asked, and rule and subject of the decisions that answer it; the last one holds.
_QUESTIONS = (
    ("sharding", (("fsdp", "fsdp"), ("fit", "fsdp"), ("several-devices", "fsdp"))),
    ("replicas", (("replicas", "replicas"), ("several-devices", "replicas"), ("fit", "groups"))),
    ("CFG parallel", (("cfg-parallel", "cfg-parallel"),)),
    ("an hour", (("scaling", "night"),)),
)


def devices_table(plan: Plan) -> Sheet:
    """A row a question: the answer that holds, and why."""
    table = Sheet("Several devices", (Column("question", keep=0), Column("answer", keep=1), Column("why", "text", label="")))
    for question, answers in _QUESTIONS:
        found = [decision for decision in plan.trail if (decision.rule, decision.subject) in answers]
        if found:
            table.add(question, _answer(question, found[-1].decision, plan), found[-1].text)
    return table


def _answer(question: str, decision: str, plan: Plan) -> str:
    if question == "replicas":
        return groups_text(plan.replicas, plan.group_size) if plan.fsdp else str(plan.replicas)
    return rate_text(plan.scaling[-1].jobs_per_hour) if question == "an hour" else decision
