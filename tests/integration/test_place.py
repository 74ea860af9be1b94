"""A worker's place on another machine, without a cluster: messages and events that come twice, and what a machine may lack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen import __version__
from batchgen.errors import RunStoppedError
from batchgen.events import Event, OutputDone, WindowDone, WorkerReady, WorkerStopped
from batchgen.execute.place import Ending, ModelSource, Place
from batchgen.execute.settings import EngineSettings, Shutdown, Window, WorkerSetup
from batchgen.inventory.options import ModelOptions
from batchgen.outputs.urls import Location
from batchgen.runfolder import RunFolder
from scripted_run import engine_settings, make_jobs, make_plan

FACTORY = "scripted:ScriptedEngine"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    made = RunFolder(tmp_path / "run")
    made.prepare()
    return made


def place(model: ModelSource | None = None) -> Place:
    return Place(FACTORY, ("cpu",), False, model, __version__)


def setup(engine: EngineSettings) -> WorkerSetup:
    return WorkerSetup(0, engine, make_plan(1), FACTORY)


def all_of(found: Place, heard: int = 0) -> tuple[list[Event], Ending]:
    """Every event from that one on, and the end."""
    events: list[Event] = []
    while True:
        new, ending = found.events(heard + len(events), 30.0)
        events += new
        if ending is not None and not new:
            return events, ending


def test_what_is_delivered_twice_is_done_once_and_what_is_asked_twice_is_told_again(folder: RunFolder) -> None:
    found = place()
    jobs = tuple(make_jobs(3))
    messages = [setup(engine_settings(folder, {})), Window(1, jobs), Shutdown()]
    for number, message in enumerate(messages, 1):
        found.deliver(number, message)
        found.deliver(number, message)
    first, _ = found.events(0, 30.0)
    again, _ = found.events(0, 30.0)
    assert again[: len(first)] == first, "the answer may have been lost on its way"
    events, ending = all_of(found)
    assert [event.key for event in events if isinstance(event, OutputDone)] == [job.key for job in jobs]
    assert [type(event) for event in events if isinstance(event, WorkerReady | WindowDone | WorkerStopped)] == [
        WorkerReady, WindowDone, WorkerStopped,
    ]  # fmt: skip
    assert "exit code 0" in ending.how
    assert found.events(len(events), 0.0) == ([], ending), "what was heard is forgotten"


def test_an_end_by_a_signal_is_told_with_its_name_and_last_words(folder: RunFolder) -> None:
    found = place()
    found.deliver(1, setup(engine_settings(folder, {"jobs": {"job0": "segv"}})))
    found.deliver(2, Window(1, tuple(make_jobs(1))))
    events, ending = all_of(found)
    assert "SIGSEGV" in ending.how
    assert "Segmentation fault" in ending.last_words
    assert not any(isinstance(event, OutputDone) for event in events)


def test_another_version_is_refused_before_anything_starts(folder: RunFolder) -> None:
    with pytest.raises(RunStoppedError, match=r"the run is of 0\.0\.0"):
        Place(FACTORY, ("cpu",), False, None, "0.0.0")


def lacking(folder: RunFolder, case: str) -> tuple[EngineSettings, ModelSource | None]:
    engine = engine_settings(folder, {})
    if case == "run folder":
        return replace(engine, run_folder=str(folder.path / "elsewhere")), None
    return replace(engine, model_folder="/nowhere/model"), ModelSource("/nowhere/model", "folder", "r", ModelOptions(), "cpu")


@pytest.mark.parametrize(("case", "error"), [("run folder", "RunStoppedError"), ("model", "ModelError")])
def test_what_is_not_on_the_machine_stops_the_run_with_its_name(folder: RunFolder, case: str, error: str) -> None:
    engine, model = lacking(folder, case)
    found = place(model)
    found.deliver(1, setup(engine))
    (event,), _ = found.events(0, 30.0)
    found.end("enough")
    assert isinstance(event, WorkerStopped)
    assert (event.error, event.exit_code) == (error, 1 if case == "run folder" else 2)
    assert "is not on" in (event.fatal or "")
    assert event.hint is not None
    assert "share" in event.hint


def test_the_built_in_model_is_found_wherever_batchgen_is_installed(folder: RunFolder) -> None:
    engine = replace(engine_settings(folder, {}), model_folder="/elsewhere/batchgen/builtin/model")
    found = place(ModelSource("builtin", "builtin", "r", ModelOptions(), "cpu"))
    assert (Path(found._fitted(setup(engine)).engine.model_folder) / "model_index.json").is_file()
    found.end()


def test_with_outputs_at_a_url_a_machine_needs_no_shared_folder(folder: RunFolder) -> None:
    engine = replace(engine_settings(folder, {}), run_folder=str(folder.path / "elsewhere"))
    engine = replace(engine, outputs=replace(engine.outputs, remote=Location.parse("s3://bucket/run")))
    found = place()
    fitted = found._fitted(setup(engine)).engine
    assert Path(fitted.outputs.folder).is_dir()
    assert Path(fitted.outputs.folder).is_relative_to(fitted.run_folder)
    assert not fitted.spool_latents, "nobody else could read them"
    found.end()
    assert not Path(fitted.run_folder).exists()


def test_workers_of_one_machine_share_its_memory(folder: RunFolder) -> None:
    engine = replace(engine_settings(folder, {}), host_memory_bytes=2**30)
    found = Place(FACTORY, ("cpu",), False, None, __version__, sharing=4)
    share = found._fitted(setup(engine)).engine.host_memory_bytes
    found.end()
    assert share is not None
    assert 0 <= share <= 2**28
