"""Settings by layers: which source wins, what is refused, and that the source of every value is known afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from batchgen.cli import settings
from batchgen.cli.numbers import WholeRange
from batchgen.errors import SettingsError, UsageError


def make_group() -> click.Group:
    @click.command()
    @click.argument("manifest", required=False)
    @click.option("--model")
    @click.option("--batch-size", default="auto")
    @click.option("--limit", type=WholeRange(1))
    @click.option("--cpu-offload-components")
    @click.option("--device-memory", multiple=True)
    @click.option("--fsdp/--no-fsdp", default=None)
    @click.option("-o", "--output")
    @click.pass_context
    def run(context: click.Context, **values: object) -> None:
        for setting in settings.resolved_settings(context):
            click.echo(f"{setting.name}|{setting.value!r}|{setting.source}|{setting.where}")

    @click.command()
    @click.option("--model")
    @click.option("--policy-only", is_flag=True)
    def plan(**values: object) -> None: ...

    group = click.Group("batchgen", context_settings={"auto_envvar_prefix": settings.PREFIX})
    commands = {"run": run, "plan": plan}
    for name, command in commands.items():
        command.name = name
        settings.add_settings_options(command, settings.OtherOptions(lambda: commands))
        group.add_command(command, name)
    return group


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    presets = tmp_path / "presets"
    presets.mkdir()
    (presets / "overnight.toml").write_text('batch-size = "3"\n')
    monkeypatch.setattr(settings, "preset_folder", lambda: presets)
    return tmp_path


def invoke(arguments: list[str], env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(make_group(), ["run", *arguments], env=dict(env or {}))


def found(result: Result) -> dict[str, tuple[str, str, str]]:
    assert result.exception is None, (result.exception, result.output)
    rows = (line.split("|") for line in result.output.splitlines())
    return {name: (value, source, where) for name, value, source, where in rows}


# The sources from strongest to weakest, each with the value it gives to --batch-size.
LAYERS = ["command line", "environment", "config", "preset", "local", "built-in"]
VALUES = dict(zip(LAYERS, ["'1'", "'7'", "'2'", "'3'", "'4'", "'auto'"], strict=True))


@pytest.mark.parametrize(("strongest", "weakest"), list(itertools.combinations_with_replacement(range(len(LAYERS)), 2)))
def test_each_source_wins_over_all_weaker_ones(strongest: int, weakest: int, here: Path) -> None:
    active = set(LAYERS[strongest : weakest + 1])
    arguments, env = [], {}
    if "local" in active:
        (here / "batchgen.toml").write_text("batch-size = 4\n")
    if "preset" in active:
        arguments += ["--preset", "overnight"]
    if "config" in active:
        (here / "mine.toml").write_text("batch_size = 2\n")
        arguments += ["--config", "mine.toml"]
    if "environment" in active:
        env["BATCHGEN_BATCH_SIZE"] = "7"
    if "command line" in active:
        arguments += ["--batch-size", "1"]
    value, source, _ = found(invoke(arguments, env))["batch-size"]
    assert (value, source) == (VALUES[LAYERS[strongest]], LAYERS[strongest])


@pytest.mark.parametrize(
    "arguments", [["--config", "mine.toml", "--preset", "overnight"], ["--preset", "overnight", "--config", "mine.toml"]],
)
def test_order_on_the_command_line_does_not_matter(arguments: list[str], here: Path) -> None:
    (here / "mine.toml").write_text("batch-size = 2\n")
    (here / "batchgen.toml").write_text("batch-size = 4\n")
    assert found(invoke(arguments))["batch-size"] == ("'2'", "config", "mine.toml")


@pytest.mark.parametrize(
    ("env", "value", "where"),
    [
        ({"BATCHGEN_BATCH_SIZE": "7"}, "'7'", "BATCHGEN_BATCH_SIZE"),
        ({"BATCHGEN_RUN_BATCH_SIZE": "8"}, "'8'", "BATCHGEN_RUN_BATCH_SIZE"),
        ({"BATCHGEN_RUN_BATCH_SIZE": "8", "BATCHGEN_BATCH_SIZE": "7"}, "'8'", "BATCHGEN_RUN_BATCH_SIZE"),
    ],
)
def test_a_variable_for_one_command_wins_over_one_for_all(env: dict[str, str], value: str, where: str, here: Path) -> None:
    assert found(invoke([], env))["batch-size"] == (value, "environment", where)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("fsdp = false", "fsdp", "False"),
        ('cpu-offload-components = ["vae", "text_encoder"]', "cpu-offload-components", "'vae,text_encoder'"),
        ('device-memory = ["24", "48"]', "device-memory", "('24', '48')"),
        ('device-memory = "24"', "device-memory", "('24',)"),
        ("limit = 5", "limit", "5"),
        ('output = "out"', "output", "'out'"),
        ('model = "a"\n[run]\nmodel = "b"', "model", "'b'"),
        ('[plan]\nmodel = "b"', "model", "None"),
        ("policy-only = true", "model", "None"),  # another command's setting may stand in the file
        ('preset = "overnight"', "batch-size", "'3'"),
    ],
)
def test_a_file_may_hold(file: str, name: str, value: str, here: Path) -> None:
    (here / "batchgen.toml").write_text(file)
    assert found(invoke([]))[name][0] == value


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("batch-sise = 4", ["batchgen.toml", "'batch-sise'", "'batch-size'"]),
        ("[run]\nmodle = 'x'", ["batchgen.toml", "'modle'", "[run]", "'model'"]),
        ("[plan]\npolicyonly = true", ["batchgen.toml", "[plan]", "'policy-only'"]),
        ("[rum]\nmodel = 'x'", ["batchgen.toml", "[rum]", "'run'"]),
        ("manifest = 'x'", ["batchgen.toml", "'manifest'"]),
        ("limit = 3\nbatch-size : 2", ["batchgen.toml", "TOML", "line 2"]),
        ("preset = 'overnite'", ["'overnite'", "'overnight'"]),
        ("fsdp = 'yes'", ["batchgen.toml", "fsdp", "'yes'", "true nor false"]),
        ("[run]\nfsdp = 1", ["[run] fsdp", "true nor false"]),
        ("limit = true", ["batchgen.toml: limit", "true"]),
        ("limit = [true]", ["batchgen.toml: limit", "true"]),
        ("[run.limit]\nmost = 3", ["[run] limit", "most"]),
        ("device-memory = [[24]]", ["batchgen.toml: device-memory", "[24]"]),
        ('output = "a\\u0000b"', ["batchgen.toml: output"]),
        ('output = ""', ["batchgen.toml: output", "blank"]),
        ("batch-size = 4\nbatch_size = 5", ["'batch-size'", "'batch_size'", "one setting"]),
        ("[plan]\npolicy-only = true\npolicy_only = true", ["[plan]", "'policy_only'", "one setting"]),
        ("config = 'other.toml'", ["batchgen.toml", "--config"]),
        (f"limit = {'9' * 5000}", ["batchgen.toml", "TOML"]),
        (f"limit = {'[' * 20000}", ["batchgen.toml", "TOML"]),
    ],
)
def test_a_file_is_refused_with_its_name_and_the_right_word(file: str, words: list[str], here: Path) -> None:
    (here / "batchgen.toml").write_text(file)
    result = invoke([])
    assert isinstance(result.exception, SettingsError | UsageError)
    assert all(word in str(result.exception) for word in words), str(result.exception)
    assert result.exception.exit_code == 2


@pytest.mark.parametrize("value", ["2.5", "3.0", "inf", "nan", "1e400", "2026-01-01", "07:30:00", "'many'", "0", "[1, 2]"])
def test_a_value_from_a_file_is_checked_like_one_from_the_command_line(value: str, here: Path) -> None:
    (here / "batchgen.toml").write_text(f"limit = {value}")
    result = invoke([])
    assert result.exit_code == 2, result.output
    assert "'--limit'" in result.output
    assert "whole number" in result.output


def test_a_file_that_is_not_utf8_says_so(here: Path) -> None:
    (here / "batchgen.toml").write_bytes(b"limit = 3 # caf\xe9")
    assert "batchgen.toml: not a TOML file: byte 15 is not UTF-8" in str(invoke([]).exception)


def test_a_switch_of_the_environment_that_is_neither_on_nor_off_is_refused(here: Path) -> None:
    assert found(invoke([], {"BATCHGEN_FSDP": "no"}))["fsdp"][0] == "False"
    result = invoke([], {"BATCHGEN_FSDP": "maybe"})
    assert (result.exit_code, "'maybe' is neither true nor false" in result.output) == (2, True), result.output


def test_no_local_settings_leaves_the_file_unread(here: Path) -> None:
    (here / "batchgen.toml").write_text("batch-sise = 4")
    assert found(invoke(["--no-local-settings"]))["batch-size"][1] == "built-in"


@pytest.mark.parametrize("where", ["absent.toml", "."])
def test_a_config_file_that_cannot_be_read_is_named(where: str, here: Path) -> None:
    result = invoke(["--config", where])
    assert isinstance(result.exception, SettingsError)
    assert where in str(result.exception)


@pytest.mark.parametrize(
    ("name", "right"), [("BATCHGEN_BATCHSIZE", "BATCHGEN_BATCH_SIZE"), ("BATCHGEN_PLAN_POLICYONLY", "BATCHGEN_PLAN_POLICY_ONLY")],
)
def test_a_misspelt_variable_is_refused_with_the_right_name(name: str, right: str, here: Path) -> None:
    result = invoke([], {name: "x"})
    assert isinstance(result.exception, SettingsError)
    assert name in str(result.exception)
    assert right in str(result.exception)


def test_another_commands_variable_is_no_fault(here: Path) -> None:
    assert found(invoke([], {"BATCHGEN_PLAN_POLICY_ONLY": "1", "BATCHGEN_POLICY_ONLY": "1"}))


def test_a_byte_order_mark_is_no_fault(here: Path) -> None:
    (here / "batchgen.toml").write_text("limit = 3", encoding="utf-8-sig")
    assert found(invoke([]))["limit"][0] == "3"


def test_the_shipped_presets_hold_only_settings_that_run_has() -> None:
    from batchgen.cli.main import load_command

    run = load_command("run")
    options = settings.options_of(run)
    assert {"overnight", "draft"} <= set(settings.preset_names())
    for name in settings.preset_names():
        layer = settings.read_layer(settings.preset_file(name), "preset", "run", options, settings.OtherOptions(lambda: {"run": run}))
        assert layer.values
