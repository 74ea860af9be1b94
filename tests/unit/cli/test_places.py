"""Where a run's folder is looked for, and what is said where none is."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.cli.main import run
from batchgen.cli.places import RunPath, run_place
from batchgen.cli.run_options import RunOptions
from batchgen.errors import RefusedError, UsageError
from batchgen.outputs.urls import Location, state_folder
from batchgen.runfolder import RunFolder

PLACE = "s3://night/a"


@pytest.fixture(autouse=True)
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    return state_folder(Location.parse(PLACE), {"XDG_STATE_HOME": str(tmp_path / "states")})


def test_a_place_stands_for_the_state_of_its_run(states: Path) -> None:
    RunFolder(states).prepare()
    RunFolder(states).write_run({})
    assert RunPath().convert(PLACE, None, None) == states


def test_a_place_of_shards_stands_for_the_only_one_or_names_all(states: Path) -> None:
    folders = [RunFolder(states.with_name(f"{states.name}-{number}-of-12")) for number in (3, 11)]
    for folder in folders:
        folder.prepare()
        if folder is folders[1]:
            assert RunPath().convert(PLACE, None, None) == folders[0].path
        folder.write_run({"shard": "3/12"})
    with pytest.raises(RefusedError) as caught:
        RunPath().convert(PLACE, None, None)
    assert all(f"  {folder.path}\n" in str(caught.value) for folder in folders)


def test_a_place_whose_state_is_elsewhere_is_refused_with_where_to_look() -> None:
    with pytest.raises(RefusedError) as caught:
        RunPath().convert("s3://key:hunter2@night/a", None, None)
    assert "no state of a run into s3://night/a is here" in str(caught.value)
    assert "begun with --state, name that folder" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_an_address_with_one_slash_is_no_folder_to_look_at() -> None:
    with pytest.raises(UsageError, match="did you mean s3://night/a"):
        RunPath().convert("s3:/night/a", None, None)


@pytest.mark.parametrize(("output", "words"), [("s3:/night/a", "did you mean s3://night/a"), ("s3://night/a", "a folder on a disk")])
def test_shards_are_joined_into_no_address(output: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["merge", "s1", "-o", output]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def nowhere(folder: Path) -> dict[str, Path]:
    """Places where no folder can ever be, and what is said of them."""
    (folder / "file").write_text("x")
    (folder / "loose").symlink_to(folder / "gone")
    (folder / "ring").symlink_to(folder / "ring")
    return {
        "Not a directory": folder / "file" / "run", "File name too long": folder / ("a" * 300), "a link to nothing": folder / "loose",
        "symbolic links": folder / "ring",
    }


@pytest.mark.parametrize("said", ["Not a directory", "File name too long", "a link to nothing", "symbolic links"])
def test_a_place_where_no_folder_can_be_is_refused_by_every_command(said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(nowhere(tmp_path)[said])
    with pytest.raises(UsageError, match=said):
        run_place(RunOptions(output=place), tmp_path / "default")
    for arguments in (["merge", "a", "-o", place], ["status", place], ["verify", place], ["report", place], ["merge", place, "-o", "all"]):
        assert run(arguments) == 2, arguments
        message = capsys.readouterr().err
        assert said in message, (arguments, message)
        assert "hint: " in message
