"""The plan's tables against whole literal ones, and its JSON against its schema."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import jsonschema
import pytest
from rich.console import Console
from rich.table import Table

from batchgen.inventory.profiles import named_profile
from batchgen.inventory.records import ComponentFacts, DeviceFacts, ModelFacts, Platform
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Overrides, Plan, PlanFacts, Predicted, StagePlan
from batchgen.report.plan_json import SCHEMA_FILE, plan_object
from batchgen.report.plan_tables import residency_table, trail_table
from batchgen.report.plan_text import too_large

GIB = 2**30


def plan_of(profile: str = "z-image", count: int = 1, platform: Platform = "cuda", **overrides: object) -> Plan:
    sizes = {"text_encoder": 8 * GIB, "transformer": 12 * GIB, "vae": None}
    parts = tuple(ComponentFacts(name, "diffusers", "Part", size, None) for name, size in sizes.items())
    model = ModelFacts("a-model", "facts", None, "", None, parts)
    devices = tuple(DeviceFacts("A card", f"cuda:{n}", 24 * GIB, 20 * GIB) for n in range(count))
    return make_plan(PlanFacts(model, named_profile(profile).profile, platform, devices, Overrides(**overrides)))  # type: ignore[arg-type]


def printed(table: Table, width: int = 110) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_residency_table() -> None:
    assert printed(residency_table(plan_of(vae_cpu_offload=True))) == RESIDENCY.strip("\n")


RESIDENCY = """
Residency
component     group         placement              bytes  by       why
──────────────────────────────────────────────────────────────────────────────────────────────────────────────
text_encoder  text_encoder  layerwise-offload   8.00 GiB  default  text_encoder streams by default, and
                                                                   profile z-image does not keep it
transformer   dit           component-offload  12.00 GiB  model    20.0 GiB free is below the profile's
                                                                   threshold of 30 GiB, so it is not kept on
                                                                   the device
vae           vae           component-offload    unknown  user     asked for by --vae-cpu-offload
a-model, profile z-image, auto mode
cuda: 1 × A card, 24.0 GiB, 20.0 available
keep-resident threshold: 30 GiB (model)
"""


def test_trail_table_of_a_manual_plan() -> None:
    assert printed(trail_table(plan_of(performance_mode="manual", keep_resident_min_available_gb="never")), 130) == TRAIL.strip("\n")


TRAIL = """
Trail
rule            subject       decision  why                                           numbers
──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
profile         profile       z-image   Profile z-image speaks for this model: given  name z-image, matched given by the caller,
                                        by the caller.                                task image
threshold       threshold     never     Your threshold (never) holds.                 user_gb never, model_gb 30, task_gb 45,
                                                                                      global_gb 120
unset-resident  plan          resident  Manual mode keeps what is not named on the    platform cuda, performance_mode manual
                                        device: everything unset is resident.
unset-resident  text_encoder  resident  text_encoder is unset, so it is resident.     was –, role text_encoder
unset-resident  transformer   resident  transformer is unset, so it is resident.      was –, role dit
unset-resident  vae           resident  vae is unset, so it is resident.              was –, role vae
replicas        replicas      1         One device, one replica.                      devices 1, fsdp no, group_size 1
cfg-parallel    cfg-parallel  no        Guidance branches do not run in parallel: it  asked no, fsdp no, uses_cfg yes, supports
                                        needs a sharded dit.                          yes, group_size 1
"""


def test_a_plan_by_the_rules_alone_warns_where_its_resident_weights_exceed_the_card() -> None:
    assert too_large(plan_of(performance_mode="speed")) is None  # 20 GiB of 20
    resident = plan_of(performance_mode="speed", dit_cpu_offload=True)
    assert too_large(resident) is None
    tight = replace(plan_of(performance_mode="speed"), devices=(DeviceFacts("A card", "cuda:0", 24 * GIB, 20 * GIB - 1),))
    said = too_large(tight)
    assert said is not None
    assert "resident weights alone are 20.00 GiB, and A card has 20.00 GiB available" in said
    assert "--component-residency transformer=layerwise-offload" in said


def test_several_devices_are_said() -> None:
    assert "2 × A card" in printed(residency_table(plan_of("qwen-image", 2)))
    assert "2 replicas, one a device" in printed(residency_table(plan_of("qwen-image", 2)))
    assert "one group of 2 devices with a sharded dit" in printed(residency_table(plan_of("qwen-image", 2, fsdp=True)))


@pytest.mark.parametrize("mode", ["auto", "manual", "speed", "memory"])
@pytest.mark.parametrize(("count", "platform"), [(1, "cuda"), (3, "cuda"), (1, "cpu"), (1, "mps")])
def test_json_keeps_to_its_schema(mode: str, count: int, platform: Platform) -> None:
    found = json.loads(json.dumps(plan_object(plan_of("z-image", count, platform, performance_mode=mode)), allow_nan=False))
    jsonschema.validate(found, json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    assert list(found["placements"]) == ["text_encoder", "transformer", "vae"]


def test_json_of_a_rehearsed_plan_keeps_to_its_schema() -> None:
    stage = StagePlan("denoise", "1024x1024", ("transformer",), 2, 12 * GIB, GIB, 13 * GIB, 10**15, 0)
    plan = replace(plan_of(), stages=(stage,), predicted=Predicted(13 * GIB, GIB, 3600.0, 10**12), batch_size=2)
    found = json.loads(json.dumps(plan_object(plan)))
    jsonschema.validate(found, json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    assert found["stages"][0]["components"] == ["transformer"]
    assert found["predicted"]["seconds"] == 3600.0


def test_the_schema_is_one_and_refuses_a_wrong_plan() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    wrong = plan_object(plan_of())
    wrong["placements"]["vae"]["mode"] = "somewhere"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)
