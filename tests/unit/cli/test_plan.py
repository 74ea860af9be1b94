"""`batchgen plan --policy-only` as a user calls it: every case of the placement table, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchgen.cli.main import run
from batchgen.inventory import device
from batchgen.report.plan_json import SCHEMA_FILE

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "cases" / "placement_cases.json").read_text(encoding="utf-8"))
SCHEMA = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
# What the message of a refused case has to name: the option or component, and the nearest right name.
REFUSED_WORDS = {
    "unknown mode is refused": ["--performance-mode", "'turbo'", "auto, manual, speed, memory"],
    "--fsdp on one device is refused": ["--fsdp", "--device"],
    "none stands alone": ["--cpu-offload-components", "'none'", "vae"],
    "selector and group flag conflict": ["--cpu-offload-components", "--dit-cpu-offload"],
    "unknown component name is refused with a suggestion": ["--cpu-offload-components", "'tranformer'", "'transformer'"],
    "residency needs NAME=MODE": ["--component-residency", "'transformer'", "NAME=MODE"],
    "mps refuses explicit streaming too": ["--layerwise-offload-components", "memory"],
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings file and no variable of the machine at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON object of a plan that is expected to work, checked against the schema."""
    code = run(["plan", *arguments, "--policy-only", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    jsonschema.validate(found, SCHEMA)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = run(["plan", "--policy-only", *arguments])
    out, err = capsys.readouterr()
    assert code == 2, out
    assert out == ""
    assert "Traceback" not in err
    return err


def arguments_of(case: dict[str, Any], folder: Path) -> list[str]:
    arguments = ["--platform", case["platform"], "--performance-mode", case["performance_mode"]]
    for memory in case["devices"]:
        arguments += ["--device-memory", f"{memory['total_gb']}:{memory['available_gb']}"]
    components = case["component_bytes"] or (dict.fromkeys(case["components"]) if case["components"] else None)
    if components is None:
        return [*arguments, "--profile", case["profile"], *case["flags"]]
    file = folder / "facts.json"
    file.write_text(json.dumps({"profile": case["profile"], "components": components}), encoding="utf-8")
    return [*arguments, "--model-facts", str(file), *case["flags"]]


@pytest.mark.parametrize("case", [case for case in CASES if "error" not in case["expect"]], ids=lambda case: case["name"])
def test_a_case_of_the_table(case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, *arguments_of(case, tmp_path))
    expected = case["expect"]
    assert {name: placement["mode"] for name, placement in plan["placements"].items()} == expected["placements"]
    assert plan["fsdp"] is expected["fsdp"]
    assert expected.get("threshold_source") in (None, plan["threshold"]["source"])
    assert plan["stages"] == []
    assert plan["predicted"] == {}
    assert [memory["total_gb"] for memory in plan["devices"]] == [memory["total_gb"] for memory in case["devices"]]


@pytest.mark.parametrize("case", [case for case in CASES if "error" in case["expect"]], ids=lambda case: case["name"])
def test_a_refused_case_of_the_table(case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, *arguments_of(case, tmp_path))
    assert all(word in message for word in REFUSED_WORDS[case["name"]]), message


def test_the_table_of_cases_is_whole() -> None:
    assert len(CASES) == 77
    assert {case["name"] for case in CASES if "error" in case["expect"]} == set(REFUSED_WORDS)


def test_without_a_model_the_default_model_is_planned_on_the_devices_at_hand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_DRIVER_MARKS", ())
    plan = planned(capsys)
    assert (plan["model"], plan["profile"], plan["platform"]) == ("Qwen/Qwen-Image", "qwen-image", "cpu")
    assert plan["devices"][0]["total_gb"] >= plan["devices"][0]["available_gb"] > 0


def test_show_residency_prints_every_component_with_who_decided_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--policy-only", "--device-memory", "24", "--show-residency"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "component-offload" in rows["transformer"]
    assert "task" in rows["transformer"]
    assert "24.0 GiB free is below the image task's threshold of 45 GiB" in rows["transformer"]
    assert "layerwise-offload" in rows["text_encoder"]
    assert "default" in rows["text_encoder"]


def test_explain_prints_the_trail_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--policy-only", "--device-memory", "24", "--explain"]) == 0
    out = capsys.readouterr().out
    rules = ["profile", "threshold", "base-offload", "layerwise-defaults", "layerwise-dit", "fsdp", "keep-resident", "twice-over", "replicas"]
    starts = [out.index(f"\n{rule} ") for rule in rules]
    assert starts == sorted(starts)


def test_plain_plan_says_modes_and_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--policy-only", "--device-memory", "24:20"]) == 0
    out = capsys.readouterr().out
    assert "transformer: component-offload\n" in out
    assert "24.0 GiB, 20.0 available" in out
    assert "--show-residency" in out


def test_cards_of_the_catalogue_and_stated_devices_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--gpu", "rtx-4090x2", "--gpu", "H100 80GB", "--device-memory", "80")
    assert sorted(memory["name"] for memory in plan["devices"]) == ["H100 80GB", "RTX 4090", "RTX 4090", "stated device"]
    assert plan["replicas"] == 4


def test_a_repeated_list_option_is_one_longer_list(capsys: pytest.CaptureFixture[str]) -> None:
    lists = ["--cpu-offload-components", "vae", "--cpu-offload-components", "text_encoder"]
    plan = planned(capsys, "--device-memory", "80", "--performance-mode", "manual", *lists)
    modes = {name: placement["mode"] for name, placement in plan["placements"].items()}
    assert modes == {"text_encoder": "component-offload", "transformer": "resident", "vae": "component-offload"}


def test_placements_can_come_from_the_environment_and_a_settings_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHGEN_DIT_CPU_OFFLOAD", "1")
    (tmp_path / "batchgen.toml").write_text('cpu_offload_components = []\ncomponent_residency = "vae=component-offload"\n', encoding="utf-8")
    plan = planned(capsys, "--device-memory", "80")
    assert plan["placements"]["transformer"]["mode"] == "component-offload"
    assert plan["placements"]["transformer"]["by"] == "user"
    assert plan["placements"]["vae"]["mode"] == "component-offload"


def test_batch_size_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "--device-memory", "80")["batch_size"] == "auto"
    assert planned(capsys, "--device-memory", "80", "--batch-size", "4")["batch_size"] == 4


def test_a_user_s_own_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\ntask = "image"\nsource = "measured here"\nkeep_resident_min_available_gb = 10\ncomponents = ["unet", "vae"]\n',
        encoding="utf-8",
    )
    plan = planned(capsys, "--device-memory", "12", "--profile-file", str(file))
    assert plan["profile"] == "mine"
    assert plan["threshold"] == {"gb": 10.0, "source": "model"}
    assert {name: placement["mode"] for name, placement in plan["placements"].items()} == {"unet": "resident", "vae": "resident"}


def test_a_component_that_no_group_knows_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"profile": "qwen-image", "components": {"transformer": None, "brand_new_part": 5}}), encoding="utf-8")
    for item in ("brand_new_part", "all", "Brand-New-Part"):
        plan = planned(capsys, "--device-memory", "80", "--model-facts", str(file), "--cpu-offload-components", item)
        assert plan["placements"]["brand_new_part"]["mode"] == "component-offload"
        assert plan["placements"]["brand_new_part"]["bytes"] == 5


def test_a_hub_model_that_cannot_be_reached_is_planned_from_its_profile_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--model", "meituan-longcat/longcat-image", "--cache-dir", str(tmp_path), "--device-memory", "32:31", "--json"]
    code = run(["plan", "--policy-only", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    plan = json.loads(out)
    assert plan["profile"] == "longcat-image"
    assert {placement["bytes"] for placement in plan["placements"].values()} == {None}
    assert "note:" in err
    assert "sizes unknown" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "RTX 4099"], ["--gpu", "'RTX 4099'", "'RTX 4090'"]),
        (["--gpu", "RTX 4090x0"], ["--gpu", "RTX 4090x0"]),
        (["--gpu", "RTX 4090", "--platform", "mps"], ["--gpu", "mps"]),
        (["--device-memory", "24:25"], ["--device-memory", "24:25"]),
        (["--device-memory", "much"], ["--device-memory", "'much'", "24"]),
        (["--device-memory", "-1"], ["--device-memory", "-1"]),
        (["--device-memory", "nan"], ["--device-memory", "nan"]),
        (["--device-memory", "24:"], ["--device-memory", "24:"]),
        (["--device-memory", "24", "--device", "cuda:0"], ["--device", "--device-memory"]),
        (["--device-memory", "24", "--platform", "cude"], ["--platform", "'cude'", "'cuda'"]),
        (["--device-memory", "24", "--profile", "qwen-imge"], ["--profile", "'qwen-imge'", "'qwen-image'"]),
        (["--device-memory", "24", "--profile", "z-image", "--profile-file", "x.toml"], ["--profile", "--profile-file"]),
        (["--device-memory", "24", "--profile-file", "nowhere.toml"], ["nowhere.toml"]),
        (["--device-memory", "24", "--model-facts", "nowhere.json"], ["--model-facts", "nowhere.json"]),
        (["--device-memory", "24", "--model", "x/y", "--model-facts", "nowhere.json"], ["--model", "--model-facts"]),
        (["--device-memory", "24", "--keep-resident-min-available-gb", "lots"], ["--keep-resident-min-available-gb", "'lots'", "never"]),
        (["--device-memory", "24", "--keep-resident-min-available-gb=-3"], ["--keep-resident-min-available-gb", "-3"]),
        (["--device-memory", "24", "--batch-size", "0"], ["--batch-size", "'0'"]),
        (["--device-memory", "24", "--size", "1000x1000"], ["--size 1000x1000: width and height are not multiples of 16", "1008x1008"]),
        (["--device-memory", "24", "--size", "1024x1000"], ["--size 1024x1000: height is not a multiple of 16", "1024x1008 or 1024x992"]),
        (["--device-memory", "24", "--model", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "--frames", "80"], ["--frames 80 is not 4n+1", "81"]),
        (["--compare", "L40S"], ["--policy-only", "--compare"]),
        (["--device", "cude:0"], ["--device", "'cude:0'", "'cuda:0'"]),
        (["--device", "cpu,cuda:0"], ["--device", "cpu", "cuda"]),
        (["no-such-file.csv", "--device-memory", "24"], ["'no-such-file.csv'"]),
        (["--model", "nobody/nothing", "--device-memory", "24"], ["nobody/nothing"]),
        (["--model", "./no-folder", "--device-memory", "24"], ["no-folder"]),
    ],
    ids=" ".join,
)
def test_wrong_input_is_refused_with_what_and_where(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    message = refused(capsys, *arguments)
    assert all(word in message for word in words), message


BESIDE = [["--gpu", "RTX 4090"], ["--device", "cpu"], ["--device-memory", "24"], ["--platform", "cuda"], ["--policy-only"],
          ["--no-rehearse"], ["--explain"], ["--show-residency"]]  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE, ids=" ".join)
def test_compare_refuses_what_it_would_not_hear(capsys: pytest.CaptureFixture[str], beside: list[str]) -> None:
    assert run(["plan", "--compare", "L40S", *beside]) == 2
    assert f"error: {beside[0]} has no place beside --compare" in capsys.readouterr().err


@pytest.mark.parametrize(("names", "said"), [("RTX 4090,foo", "--compare: there is no 'foo'"), ("L40Sx0", "--compare L40Sx0: 0 is no number")])
def test_a_wrong_name_in_compare_is_compare_s(capsys: pytest.CaptureFixture[str], names: str, said: str) -> None:
    assert run(["plan", "--compare", names]) == 2
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("how", [["--policy-only"], ["--no-rehearse"], ["--no-rehearse", "--json"], ["--compare", "T4"]], ids=" ".join)
def test_a_manifest_s_faults_are_told_with_and_without_a_rehearsal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, how: list[str],
) -> None:
    (tmp_path / "list.csv").write_text("prompt,width,height\na cat,64,64\n,1000,64\n", encoding="utf-8")
    where = [] if "--compare" in how else ["--gpu", "T4"]
    assert run(["plan", "list.csv", *where, *how]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "list.csv:3:prompt: the prompt is empty" in err
    assert "list.csv:3:width: width is not a multiple of 16" in err


def test_a_plan_that_is_not_rehearsed_says_jobs_and_shapes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("prompt,width,height\na cat,64,64\na dog,96,64\na hen,64,64\n", encoding="utf-8")
    assert run(["plan", "list.csv", "--model", "builtin", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "3 jobs of 2 shapes: 2 at 64x64, 9 steps, guidance 0; 1 at 96x64, 9 steps, guidance 0" in out


@pytest.mark.parametrize("text", ["2x RTX 4090", "RTX 4090x2", "2 × rtx-4090", "2X RTX4090"])
def test_a_number_of_cards_may_stand_before_or_behind_the_name(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert [card["name"] for card in planned(capsys, "--gpu", text)["devices"]] == ["RTX 4090"] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy-only", "--gpu", "T4", "--performance-mode", "speed"], "Without --policy-only the plan is made to fit"),
        (["--no-rehearse", "--gpu", "T4", "--performance-mode", "speed"], "Without --no-rehearse the plan is made to fit"),
        (["--platform", "mps", "--device-memory", "24", "--performance-mode", "speed"], "With --rehearse the plan is made to fit"),
        (["--platform", "cpu", "--device-memory", "24"], "It needs a machine with more memory, or a smaller model or --dtype"),
    ],
    ids=["by the rules", "not rehearsed", "nothing said", "on a CPU weights have nowhere else to go"],
)
def test_what_does_not_fit_is_told_with_what_would_help(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert run(["plan", *arguments]) == 0
    err = capsys.readouterr().err
    assert said in err
    assert ("layerwise-offload" in err) is ("cpu" not in arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["not an object"]),
        ("{", ["not JSON"]),
        ('{"components": {}}', ["components"]),
        ('{"componants": {"vae": 1}}', ["'componants'", "'components'"]),
        ('{"components": {"vae": -1}}', ["vae", "-1"]),
        ('{"components": {"vae": true}}', ["vae", "True"]),
        ('{"components": {"vae": 1.5}}', ["vae", "1.5"]),
        ('{"components": {"a,b": 1}}', ["'a,b'"]),
        ('{"profile": 3, "components": {"vae": 1}}', ["profile", "3"]),
        ('{"profile": "z-imge", "components": {"vae": 1}}', ["'z-imge'", "'z-image'"]),
    ],
)
def test_wrong_model_facts_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "facts.json"
    file.write_text(text, encoding="utf-8")
    message = refused(capsys, "--device-memory", "24", "--model-facts", str(file))
    assert all(word in message for word in words), message


def test_a_component_s_name_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"components": {"vae\x1b[2J[bold]": None}}), encoding="utf-8")
    for wish in ([], ["--show-residency"], ["--explain"]):
        assert run(["plan", "--policy-only", "--device-memory", "24", "--model-facts", str(file), *wish]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "[bold]" in out


def write_part(folder: Path, name: str, file: str, elements: int) -> None:
    """A component of one bfloat16 tensor of zeros."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}}).encode()
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text("{}", encoding="utf-8")
    (folder / name / file).write_bytes(len(header).to_bytes(8, "little") + header + bytes(2 * elements))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Z-Image folder of stub weights beside a null part and a part that nobody knows."""
    root = tmp_path / "Z-Image-Turbo"
    for name, elements in (("transformer", 8), ("vae", 4), ("brand_new_part", 2)):
        write_part(root, name, "diffusion_pytorch_model.safetensors", elements)
    write_part(root, "text_encoder", "model.safetensors", 6)
    for name, file in (("scheduler", "scheduler_config.json"), ("tokenizer", "tokenizer_config.json")):
        (root / name).mkdir()
        (root / name / file).write_text("{}", encoding="utf-8")
    index = {
        "_class_name": "ZImagePipeline", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3Model"], "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
        "brand_new_part": ["diffusers", "AutoencoderKL"], "image_encoder": [None, None],
    }  # fmt: skip
    (root / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return root


def test_a_folder_is_planned_with_the_sizes_of_its_files(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text("prompt\na cat\n", encoding="utf-8")
    plan = planned(capsys, "prompts.csv", "--model", str(folder), "--device-memory", "24")
    assert plan["profile"] == "z-image-turbo"
    assert {name: placement["bytes"] for name, placement in plan["placements"].items()} == {
        "text_encoder": 12, "transformer": 16, "vae": 8, "brand_new_part": 4,
    }  # fmt: skip
    # So little fits twice into anything.
    assert {placement["mode"] for placement in plan["placements"].values()} == {"resident"}
    assert {placement["by"] for name, placement in plan["placements"].items() if name == "transformer"} == {"size"}


def test_a_profile_may_be_put_over_a_folder(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    plan = planned(capsys, "--model", str(folder), "--profile", "mova", "--device-memory", "24")
    assert plan["profile"] == "mova"
    assert "brand_new_part" in plan["placements"]


def test_a_broken_folder_is_not_planned_from_a_profile(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert "vae" in refused(capsys, "--model", str(folder), "--device-memory", "24")


def test_planning_writes_nothing(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    planned(capsys, "--model", str(folder), "--device-memory", "24")
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_run_takes_the_same_profile_options(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.cli.engines import workplace
    from batchgen.cli.rendering import gather
    from batchgen.cli.request import RenderRequest
    from batchgen.cli.run_options import RunOptions
    from batchgen.inventory.options import ModelOptions
    from batchgen.manifest.options import ManifestOptions
    from batchgen.plan.records import Overrides

    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ntask = "image"\nsource = "me"\n[defaults]\nsteps = 3\n', encoding="utf-8")

    def gathered(**overrides: str) -> Any:
        run = RunOptions(devices=("cpu",))
        request = RenderRequest("p.csv", str(folder), ModelOptions(), Overrides(**overrides), ManifestOptions(), run, ())  # type: ignore[arg-type]
        with workplace(run) as place:
            return gather(request, place)

    assert gathered().profile.name == "z-image-turbo"
    assert gathered(profile="mova").plan.profile == "mova"
    assert gathered(profile_file=str(file)).profile.defaults == (("steps", 3),)
