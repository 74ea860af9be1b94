"""`batchgen plan` with a rehearsal: a full-size model on a card that is not here, without its files, a network or a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli.fitting import rehearsal_request
from batchgen.inventory.known import known_facts
from batchgen.inventory.options import ModelOptions
from batchgen.jobs import ShapeKey
from batchgen.rehearsal import cache

CASES = Path(__file__).parents[1] / "cases"
MODEL = "Qwen/Qwen-Image"
SHAPE = ShapeKey(1024, 1024, None, None, 50, 4.0, None, None, None, ())

# Runs the command line and tells which heavy libraries it loaded.
RUN = """
import json, sys
from batchgen.cli.main import main
try:
    main()
except SystemExit as ended:
    code = ended.code
heavy = [name for name in ("torch", "diffusers", "transformers", "pandas", "huggingface_hub") if name in sys.modules]
print(json.dumps([code, heavy]), file=sys.stderr)
"""


@pytest.fixture
def seeded(tmp_path: Path) -> Path:
    """A cache that holds the rehearsal of Qwen-Image at 1024x1024."""
    facts = known_facts(MODEL, ModelOptions(), platform="cuda")
    assert facts is not None
    entry = cache.key(Path(facts.folder or ""), rehearsal_request(facts, [SHAPE]))
    (tmp_path / "rehearsals").mkdir()
    shutil.copy(CASES / "rehearsals" / "qwen-image.json", tmp_path / "rehearsals" / f"{entry}.json")
    return tmp_path


def batchgen(place: Path, *arguments: str) -> tuple[int, str, str, list[str]]:
    environment = os.environ | {"BATCHGEN_CACHE": str(place), "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hub"), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, env=environment, check=False, cwd=place)
    lines = done.stderr.strip().splitlines()
    code, heavy = json.loads(lines[-1])
    return code or 0, done.stdout, "\n".join(lines[:-1]), heavy


def planned(place: Path, *arguments: str) -> dict[str, Any]:
    code, out, err, heavy = batchgen(place, "plan", "--model", MODEL, "--size", "1024x1024", "--json", *arguments)
    assert code == 0, err
    assert [name for name in heavy if name != "huggingface_hub"] == [], "a plan from the cache loads no torch"
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_plan_from_the_cache_answers_without_torch_files_or_network(seeded: Path) -> None:
    plan = planned(seeded, "--gpu", "RTX 4090")
    assert {name: spot["mode"] for name, spot in plan["placements"].items()} == {
        "text_encoder": "component-offload", "transformer": "layerwise-offload", "vae": "component-offload",
    }  # fmt: skip
    assert plan["placements"]["transformer"]["bytes"] == 40_860_802_176
    assert [stage["name"] for stage in plan["stages"]] == ["text_encoder", "denoise", "decode"]
    assert plan["predicted"]["peak_device_bytes"] <= 24564 * 2**20
    assert plan["predicted"]["seconds"] > 0
    assert plan["predicted"]["bytes_moved"] > 0


def test_jobs_come_from_the_manifest(seeded: Path) -> None:
    rows = "\n".join(f"a boat {number},1024,1024" for number in range(30))
    (seeded / "prompts.csv").write_text(f"prompt,width,height\n{rows}\n", encoding="utf-8")
    code, out, err, _ = batchgen(
        seeded, "plan", "prompts.csv", "--model", MODEL, "--steps", "50", "--guidance", "4", "--gpu", "RTX 4090", "--json"
    )
    assert code == 0, err
    night = next(decision for decision in json.loads(out)["trail"] if decision["rule"] == "predict")
    assert night["numbers"]["jobs"] == 30


def test_policy_only_leaves_stages_empty(seeded: Path) -> None:
    plan = planned(seeded, "--gpu", "RTX 4090", "--policy-only")
    assert plan["stages"] == []
    assert plan["predicted"] == {}


def test_what_does_not_fit_is_refused_with_numbers_and_force_plans_it(seeded: Path) -> None:
    asked = ("plan", "--model", MODEL, "--size", "1024x1024", "--gpu", "RTX 4090", "--performance-mode", "manual")
    code, out, err, heavy = batchgen(seeded, *asked)
    assert (code, out) == (2, "")
    assert re.search(
        r"denoise at 1024x1024, 50 steps, guidance 4, batch 1, needs 5\d\.\d\d GiB on the device .* but 23\.99 GiB are available", err
    )
    assert "--performance-mode auto" in err
    assert "torch" not in heavy
    code, out, err, _ = batchgen(seeded, *asked, "--force", "--json")
    assert code == 0, err
    assert [decision["decision"] for decision in json.loads(out)["trail"] if decision["decision"] == "forced"] == ["forced"]


def test_cards_are_compared_side_by_side(seeded: Path) -> None:
    code, out, err, heavy = batchgen(
        seeded, "plan", "--model", MODEL, "--size", "1024x1024", "--compare", "RTX 4090", "--compare", "H100 80GB"
    )
    assert code == 0, err
    assert "torch" not in heavy
    lines = [line for line in out.splitlines() if "RTX 4090" in line or "H100 80GB" in line]
    assert len(lines) == 2
    assert "layerwise-offload" in out
    assert "compute: denoise" in out


WRONG = {
    "a size that is none": (("--size", "1024"), "write WIDTHxHEIGHT"),
    "an unknown card": (("--gpu", "RTX 4O90"), "Did you mean 'RTX 4090'?"),
    "a memory that is none": (("--reserve-vram", "much"), "not a size"),
    "no jobs": (("--jobs", "0"), "--jobs"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options_are_named(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    code, _, err, heavy = batchgen(tmp_path, "plan", "--model", MODEL, *arguments)
    assert code == 2
    assert said in err
    assert "torch" not in heavy


def test_a_box_of_four_cards_is_told_as_groups_with_branches_and_what_each_more_brings(seeded: Path) -> None:
    plan = planned(seeded, "--gpu", "A100 80GBx4", "--fsdp", "--cfg-parallel")
    assert (plan["fsdp"], plan["cfg_parallel"], plan["replicas"], plan["group_size"]) == (True, True, 2, 2)
    assert [point["devices"] for point in plan["scaling"]] == [2, 4]
    assert plan["scaling"][1]["jobs_per_hour"] > 1.9 * plan["scaling"][0]["jobs_per_hour"]
    code, out, err, _ = batchgen(
        seeded, "plan", "--model", MODEL, "--size", "1024x1024", "--gpu", "A100 80GBx4", "--fsdp", "--cfg-parallel", "--show-residency")
    assert code == 0, err
    assert re.search(r"replicas +2 groups of 2 +The sharded dit fits on 2 devices", out)
    assert re.search(r"CFG parallel +yes +--cfg-parallel: each half of a group of 2", out)
    assert re.search(r"an hour +\d+ +Predicted an hour", out)


def test_branches_without_groups_are_refused_with_the_reason(seeded: Path) -> None:
    code, out, err, _ = batchgen(seeded, "plan", "--model", MODEL, "--gpu", "A100 80GBx4", "--cfg-parallel")
    assert (code, out) == (2, "")
    assert "it needs a sharded dit" in err
    assert "Add --fsdp" in err
