"""Full-size models on the boxes people have: what `plan --show-residency` prints, as committed tables.

Every line of them gives its reason; docs/residency.md and docs/scale.md explain them. After a change that is meant:
`python tests/unit/plan/test_golden_devices.py` writes them anew, and the diff says what changed.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from batchgen.errors import PlanRefusedError
from batchgen.inventory import catalogue
from batchgen.inventory.known import known_facts
from batchgen.inventory.options import ModelOptions
from batchgen.inventory.profiles import find_profile
from batchgen.plan.fit import FitOptions, fit_plan
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Overrides, Plan, PlanFacts, Workload
from batchgen.rehearsal.cache import from_json
from batchgen.report.devices_table import devices_table
from batchgen.report.plan_tables import residency_table

CASES = Path(__file__).parents[2] / "cases"
JOBS = 100
MODELS = {"qwen-image": "Qwen/Qwen-Image", "wan2.2-a14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers"}
BOXES = {"2x24": "RTX 4090x2", "2x48": "RTX A6000x2", "4x80": "A100 80GBx4", "8x80": "H100 80GBx8"}
ASKED = {
    "": Overrides(),
    "--fsdp": Overrides(fsdp=True),
    "--fsdp --cfg-parallel": Overrides(fsdp=True, cfg_parallel=True),
}  # fmt: skip


def planned(name: str, box: str, asked: str) -> Plan:
    facts = known_facts(MODELS[name], ModelOptions(), platform="cuda")
    assert facts is not None
    rehearsed = from_json(json.loads((CASES / "rehearsals" / f"{name}.json").read_text(encoding="utf-8")))
    devices = catalogue.cards([BOXES[box]])
    made = PlanFacts(facts, find_profile(facts), "cuda", devices, ASKED[asked])
    workload = Workload(((rehearsed.profiles[0].shape, JOBS),))
    return fit_plan(make_plan(made), made, rehearsed, workload, FitOptions(rates=catalogue.rates_of(devices[0].name)))


def tables(name: str, box: str) -> str:
    """What is printed for a model on a box, whatever of sharding is asked for."""
    console = Console(file=io.StringIO(), width=160, color_system=None, legacy_windows=False)
    for asked in ASKED:
        size = " --size 1024x1024" if name == "qwen-image" else ""
        console.print(f"$ batchgen plan --model {MODELS[name]}{size} --gpu {BOXES[box]!r} {asked}".rstrip() + " --show-residency", highlight=False)
        try:
            plan = planned(name, box, asked)
        except PlanRefusedError as error:
            console.print(f"error: {error.message}\n{error.hint}\n", highlight=False, markup=False)
            continue
        console.print(residency_table(plan))
        console.print()
        console.print(devices_table(plan))
        console.print()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("name", MODELS)
def test_several_devices_are_used_as_committed(name: str, box: str) -> None:
    assert tables(name, box) == (CASES / "plans" / f"{name}-{box}.txt").read_text(encoding="utf-8")


# model, box, asked -> (sharded, replicas, devices of each, branches in parallel)
DECIDED = {
    ("qwen-image", "2x24", ""): (False, 2, 1, False),
    ("qwen-image", "2x48", ""): (False, 2, 1, False),
    ("qwen-image", "2x48", "--fsdp"): (True, 1, 2, False),
    ("qwen-image", "2x48", "--fsdp --cfg-parallel"): (True, 1, 2, True),
    ("qwen-image", "4x80", "--fsdp --cfg-parallel"): (True, 2, 2, True),
    ("qwen-image", "8x80", ""): (False, 8, 1, False),
    ("qwen-image", "8x80", "--fsdp"): (True, 4, 2, False),
    ("wan2.2-a14b", "2x24", ""): (False, 2, 1, False),
    ("wan2.2-a14b", "4x80", ""): (False, 4, 1, False),
    ("wan2.2-a14b", "8x80", "--fsdp --cfg-parallel"): (True, 4, 2, True),
}


@pytest.mark.parametrize("case", DECIDED, ids=" ".join)
def test_what_a_box_is_used_for(case: tuple[str, str, str]) -> None:
    plan = planned(*case)
    assert (plan.fsdp, plan.replicas, plan.group_size, plan.cfg_parallel) == DECIDED[case]
    assert plan.scaling[-1].devices == len(plan.devices)


@pytest.mark.parametrize("name", MODELS)
def test_a_share_that_does_not_fit_two_cards_of_24_gib_is_refused(name: str) -> None:
    with pytest.raises(PlanRefusedError, match="needs"):
        planned(name, "2x24", "--fsdp")


if __name__ == "__main__":
    for chosen in MODELS:
        for box in BOXES:
            (CASES / "plans" / f"{chosen}-{box}.txt").write_text(tables(chosen, box), encoding="utf-8")
    sys.exit(0)
