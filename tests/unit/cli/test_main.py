"""The command line's frame: exit codes, messages instead of tracebacks, any locale."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest

from batchgen import builtin
from batchgen.cli import main
from batchgen.cli.demo import next_lines
from batchgen.cli.helping import SHORT, long_name
from batchgen.errors import BatchgenError, DiskError, InterruptedRunError, RefusedError, UsageError


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command `fake` whose `action` a test sets."""
    module = types.ModuleType("batchgen.cli.fake")

    @click.command()
    @click.option("--number", type=int)
    def command(number: int | None) -> int | None:
        return module.action()

    module.command = command
    module.action = lambda: None
    monkeypatch.setitem(sys.modules, "batchgen.cli.fake", module)
    monkeypatch.setattr(main, "COMMANDS", {"fake": "A test's own."})
    return module


def raising(error: BaseException):
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RefusedError("no such thing", hint="do that"), 2, "error: no such thing\nhint: do that\n"),
        (UsageError("too big", option="--batch-size"), 2, "error: --batch-size: too big\n"),
        (DiskError("the disk is full"), 1, "error: the disk is full\n"),
        (InterruptedRunError("SIGTERM", "3 of 5 done; the same command goes on"), 143, "stopped: 3 of 5 done; the same command goes on\n"),
        (InterruptedRunError("SIGHUP", "x"), 129, "stopped: x\n"),
        (InterruptedRunError("SIGINT", "stopped by SIGINT; 3 jobs are left"), 130, "stopped by SIGINT; 3 jobs are left\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BatchgenError("bad \x1b[2J name"), 1, "error: bad \\x1b[2J name\n"),
    ],
)
def test_an_error_becomes_its_message_and_code(
    error: BaseException, code: int, said: str, fake: types.ModuleType, capsys: pytest.CaptureFixture[str],
) -> None:
    fake.action = raising(error)
    assert main.run(["fake"]) == code
    output = capsys.readouterr()
    assert output.err == said
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["fake", "--numbr", "3"], "--number"),
        (["fake", "--number", "x"], "'--number'"),
        (["fak"], "'fake'"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_one_message_and_2(
    arguments: list[str], word: str, fake: types.ModuleType, capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert word in error
    assert "Traceback" not in error


def test_a_wrong_value_names_the_variable_or_file_it_came_from(
    fake: types.ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batchgen.toml").write_text('number = "many"')
    assert main.run(["fake"]) == 2
    assert "(from batchgen.toml)" in capsys.readouterr().err
    monkeypatch.setenv("BATCHGEN_NUMBER", "several")
    assert main.run(["fake"]) == 2
    assert "(from BATCHGEN_NUMBER)" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_and_a_file(
    fake: types.ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fake.action = raising(ZeroDivisionError("a fault of ours"))
    assert main.run(["fake"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: unexpected ZeroDivisionError: a fault of ours; details: ")
    assert error.count("\n") == 1
    assert "Traceback" in next(tmp_path.glob("batchgen-crash-*.txt")).read_text()


@pytest.mark.parametrize("arguments", [["fake", "--debug"], ["--debug", "fake"]])
def test_debug_shows_the_traceback(arguments: list[str], fake: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    fake.action = raising(ZeroDivisionError("a fault of ours"))
    assert main.run(arguments) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_commands_own_exit_code_is_kept(fake: types.ModuleType) -> None:
    fake.action = lambda: 3
    assert main.run(["fake"]) == 3


def batchgen(*arguments: bytes | str, env: dict[str, str], stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "batchgen", *arguments], env={**os.environ, **env}, stdout=stdout, stderr=subprocess.PIPE, check=False,
        timeout=60,
    )


@pytest.mark.parametrize("env", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}])
def test_text_is_utf8_whatever_the_locale(env: dict[str, str]) -> None:
    result = batchgen("nächtlich-夜".encode(), env=env)
    assert result.returncode == 2
    assert "there is no command 'nächtlich-夜'".encode() in result.stderr


def test_a_closed_pipe_is_no_error_message() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        result = batchgen("--help", env={}, stdout=write)
    finally:
        os.close(write)
    assert result.returncode == 141
    assert result.stderr == b""


def test_every_command_in_the_list_can_be_loaded_and_has_help() -> None:
    for name in main.COMMANDS:
        command = main.load_command(name)
        assert command.help
        assert any(parameter.name == "debug" for parameter in command.params)


@pytest.mark.parametrize("name", ["", *main.COMMANDS])
def test_help_fits_a_screen_of_forty_lines_and_eighty_columns(name: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run([*([name] if name else []), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    examples = next(number for number, line in enumerate(lines) if line.startswith("  batchgen ") or "batchgen completion bash" in line)
    assert examples < next(number for number, line in enumerate(lines) if line.startswith(("  -", "Commands:", "  --")))


@pytest.mark.parametrize("name", SHORT)
def test_short_help_names_options_that_there_are_in_a_line_each(name: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    known = {long_name(part) for part in main.load_command(name).params if isinstance(part, click.Option)}
    named = [option for rows in SHORT[name].values() for option, _, _ in rows]
    assert set(named) <= known
    assert len(named) == len(set(named))
    main.run([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(any(f"--{option}" in line and text in line for line in lines) for rows in SHORT[name].values() for option, _, text in rows)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_all_leaves_nothing_out_and_nothing_unsorted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([name, "--help-all"]) == 0
    text = capsys.readouterr().out
    for parameter in main.load_command(name).params:
        if isinstance(parameter, click.Option):
            assert max(parameter.opts, key=len) in text
    other = text.partition("\nOther:\n")[2].strip().splitlines()
    own = {"--help-all", "-h,"} | ({"--with-failure"} if name == "demo" else set())  # of no topic that another command has
    assert {line.split()[0] for line in other if line.startswith("  -") or line.startswith("--")} <= own


SWALLOWED = [
    ("an option behind a card's name", ["plan", "--compare", "--json"], "--compare needs a value, and --json behind it is an option"),
    ("a short one", ["run", "x.csv", "-o", "-q"], "-o needs a value, and -q behind it is an option"),
    ("one with a value of its own", ["plan", "--gpu", "--size=64x64"], "--gpu needs a value"),
    ("one that is off by its own name", ["plan", "--model", "--no-fsdp"], "--model needs a value"),
]


@pytest.mark.parametrize(("arguments", "message"), [row[1:] for row in SWALLOWED], ids=[row[0] for row in SWALLOWED])
def test_an_option_is_not_taken_for_a_value(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    assert message in capsys.readouterr().err


BLANK = [
    (["run", "list.csv", "--model", "builtin", "-o", ""], "--output is blank"),
    (["run", "list.csv", "--model", "builtin", "--output="], "--output is blank"),
    (["run", "list.csv", "--model", ""], "--model is blank"),
    (["run", "list.csv", "--model", "builtin", "--lora", ""], "--lora is blank"),
    (["run", "", "--model", "builtin"], "MANIFEST is blank"),
    (["check", "list.csv", "--config", ""], "--config is blank"),
    (["status", ""], "DIR is blank"),
    (["merge", ".", "", "-o", "all"], "DIR is blank"),
    (["rerender", ""], "FILE is blank"),
    (["plan", "--gpu", ""], "--gpu is blank"),
]


@pytest.mark.parametrize(("arguments", "message"), BLANK)
def test_a_blank_value_is_no_value(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.csv").write_text("prompt\na ring\n")
    assert main.run(arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["list.csv"]


@pytest.mark.parametrize(
    "arguments",
    [["check", "list.csv", "--model"], ["check", "list.csv", "--faults-file"], ["rerender"], ["check"], ["plan", "--model-facts"]],
)
def test_a_path_that_is_too_long_is_refused_by_its_name(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.csv").write_text("prompt\na ring\n")
    assert main.run([*arguments, "n" * 300]) == 2
    said = capsys.readouterr().err
    assert "nnn" in said
    assert "unexpected" not in said


def test_a_blank_negative_prompt_is_one(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("prompt\na ring\n")
    assert main.run(["check", str(tmp_path / "list.csv"), "--negative-prompt", ""]) == 0


NOT_FINITE = [
    ["run", "x.csv", "--max-hours"], ["run", "x.csv", "--job-timeout"], ["status", ".", "--interval"], ["plan", "--guidance"],
    ["plan", "--keep-resident-min-available-gb"], ["check", "x.csv", "--guidance"], ["check", "x.csv", "--fps"],
]


@pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
@pytest.mark.parametrize("arguments", NOT_FINITE, ids=" ".join)
def test_no_option_takes_a_number_that_is_not_finite(arguments: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*arguments, value]) == 2
    assert f"'{arguments[-1]}'" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Usage: batchgen")
    assert "error:" not in error
    assert "hint:" not in error


def test_the_demo_renders_as_many_pictures_as_it_says() -> None:
    with builtin.demo_manifest(with_failure=False).open(encoding="utf-8", newline="") as file:
        assert sum(int(row["num_images"] or 1) for row in csv.DictReader(file)) == 16
    assert "sixteen pictures" in main.COMMANDS["demo"]
    assert "sixteen pictures" in str(main.load_command("demo").help)


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_the_demos_next_steps_fit_but_for_commands_that_are_never_broken(width: int) -> None:
    steps = [("batchgen status results/demo-builtin", "what the run folder knows"), ("batchgen run prompts.csv --model Qwen/Qwen-Image", "your own list; " * 3)]
    lines = next_lines(steps, width)
    assert all(len(line) <= width or line.strip() in dict(steps) for line in lines)
    assert all(any(step in line for line in lines) for step, _ in steps)
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(part for step in steps for part in step).split())


def test_a_value_that_looks_like_an_option_can_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "--gpu=--json"]) == 2
    assert "there is no '--json' in the catalogue" in capsys.readouterr().err
