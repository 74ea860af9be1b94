"""Full-size models on the cards people have: what is planned and why, as committed tables.

The numbers are rehearsals of the models' published configs (tests/cases/rehearsals, made by `batchgen plan`); the tables are the fit's
answer to them. After a change that is meant: `python tests/unit/plan/test_golden.py` writes them anew, and the diff says what changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from batchgen.errors import PlanRefusedError
from batchgen.inventory import catalogue
from batchgen.inventory.known import known_facts
from batchgen.inventory.options import ModelOptions
from batchgen.inventory.profiles import find_profile
from batchgen.plan.fit import FitOptions, fit_plan
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Overrides, Plan, PlanFacts, Workload
from batchgen.rehearsal.cache import from_json
from batchgen.units import size_text

CASES = Path(__file__).parents[2] / "cases"
JOBS = 100
# rehearsal -> (model, cards)
TABLES = {
    "qwen-image": ("Qwen/Qwen-Image", ("RTX 4090", "RTX A6000", "H100 80GB", "H200 141GB")),
    "wan2.1-t2v-14b": ("Wan-AI/Wan2.1-T2V-14B-Diffusers", ("RTX 4090", "H100 80GB")),
    "hunyuan-video-1.5": ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", ("H100 80GB",)),
}


def planned(name: str, model: str, card: str) -> Plan:
    facts = known_facts(model, ModelOptions(), platform="cuda")
    assert facts is not None
    rehearsed = from_json(json.loads((CASES / "rehearsals" / f"{name}.json").read_text(encoding="utf-8")))
    asked = PlanFacts(facts, find_profile(facts), "cuda", catalogue.cards([card]), Overrides())
    workload = Workload(((rehearsed.profiles[0].shape, JOBS),))
    return fit_plan(make_plan(asked), asked, rehearsed, workload, FitOptions(rates=catalogue.rates_of(card)))


def table(name: str) -> str:
    """The plan of each card in plain lines."""
    model, cards = TABLES[name]
    lines = [f"{model}, {JOBS} jobs"]
    for card in cards:
        lines += ["", f"## {card}"]
        try:
            plan = planned(name, model, card)
        except PlanRefusedError as error:
            lines.append(f"refused: {error.message}")
            continue
        lines += [f"{spot.component}: {spot.mode} ({spot.by}), {spot.reason}" for spot in plan.placements]
        lines += [decision.text for decision in plan.trail if decision.rule == "batch" or decision.decision == "tiling"]
        lines.append(f"windows of {plan.window}, {size_text(plan.predicted.bytes_moved)} moved")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", TABLES)
def test_full_size_models_are_planned_as_committed(name: str) -> None:
    assert table(name) == (CASES / "plans" / f"{name}.txt").read_text(encoding="utf-8")


def test_a_card_of_24_gib_streams_qwen_image_and_holds_its_text_encoder_whole() -> None:
    plan = planned("qwen-image", "Qwen/Qwen-Image", "RTX 4090")
    assert (plan.modes["text_encoder"], plan.modes["transformer"]) == ("component-offload", "layerwise-offload")


@pytest.mark.parametrize("card", ["H100 80GB", "H200 141GB"])
def test_a_card_of_80_gib_and_more_moves_nothing_of_qwen_image(card: str) -> None:
    assert set(planned("qwen-image", "Qwen/Qwen-Image", card).modes.values()) == {"resident"}


def test_a_clip_whose_decode_is_larger_than_the_card_decodes_in_tiles_and_moves_nothing() -> None:
    """A card of 80 GiB, which the threshold for clips of 120 GiB never reaches: the weights fit twice over all the same."""
    plan = planned("hunyuan-video-1.5", TABLES["hunyuan-video-1.5"][0], "H100 80GB")
    assert (plan.threshold_gb, plan.threshold_source) == (120, "global")
    assert set(plan.modes.values()) == {"resident"}
    assert plan.vae_tiling


if __name__ == "__main__":
    for chosen in sys.argv[1:] or TABLES:
        (CASES / "plans").mkdir(exist_ok=True)
        (CASES / "plans" / f"{chosen}.txt").write_text(table(chosen), encoding="utf-8")
