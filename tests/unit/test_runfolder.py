"""Whose run folder it is, and who may work in it now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batchgen import runlock
from batchgen.errors import RefusedError, RunLockedError, RunStoppedError
from batchgen.runfolder import RunFolder, pixel_diff
from batchgen.runlock import Holder, RunLock, hold_for_worker, is_alive, read_holder


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\na cat\n")
    return path


def begun(folder: Path, manifest: Path, **record: object) -> RunFolder:
    run = RunFolder.open(folder, manifest_path=manifest)
    with run.lock():
        run.prepare()
        run.write_run(record)
    return run


# --- whose folder ---------------------------------------------------------------------------------------------------


def test_opening_writes_nothing(tmp_path: Path, manifest: Path) -> None:
    RunFolder.open(tmp_path / "run", manifest_path=manifest)
    assert not (tmp_path / "run").exists()


def test_the_same_manifest_goes_on_also_edited(tmp_path: Path, manifest: Path) -> None:
    begun(tmp_path / "run", manifest)
    manifest.write_text("prompt\na cat\na dog\n")
    assert RunFolder.open(tmp_path / "run", manifest_path=manifest).path == tmp_path / "run"


@pytest.mark.parametrize(("began", "renamed", "edited", "refused"), [
    ("csv", "p.txt", False, True), ("csv", None, False, True), ("txt", "p.txt", False, False), ("csv", None, True, False), (None, "p.txt", False, False),
], ids=["another suffix", "another --format", "another suffix, the kind said", "edited, and of another kind", "begun before kinds were noted"])
def test_the_same_bytes_read_as_another_kind_are_another_list(
    tmp_path: Path, manifest: Path, began: str | None, renamed: str | None, edited: bool, refused: bool,
) -> None:
    begun(tmp_path / "run", manifest, manifest_kind=began)
    now = manifest.rename(tmp_path / renamed) if renamed is not None else manifest
    if edited:
        now.write_text("other words\n")
    folder = RunFolder(tmp_path / "run", now)
    if refused:
        with pytest.raises(RefusedError, match="read as csv; the same bytes are read as txt now"):
            folder.check_kind("txt")
    else:
        folder.check_kind("txt")


def test_the_same_manifest_goes_on_also_moved(tmp_path: Path, manifest: Path) -> None:
    begun(tmp_path / "run", manifest)
    moved = manifest.rename(tmp_path / "moved.csv")
    assert RunFolder.open(tmp_path / "run", manifest_path=moved).path == tmp_path / "run"


def test_another_manifest_is_refused_by_name_and_new_starts_beside(tmp_path: Path, manifest: Path) -> None:
    begun(tmp_path / "run", manifest)
    other = tmp_path / "other.csv"
    other.write_text("prompt\na tree\n")
    with pytest.raises(RefusedError, match=r"prompts\.csv"):
        RunFolder.open(tmp_path / "run", manifest_path=other)
    assert RunFolder.open(tmp_path / "run", manifest_path=other, new=True).path == tmp_path / "run-2"
    begun(tmp_path / "run-2", other)
    assert RunFolder.open(tmp_path / "run", manifest_path=other, new=True).path == tmp_path / "run-3"


def test_new_takes_the_name_itself_where_it_is_free(tmp_path: Path, manifest: Path) -> None:
    assert RunFolder.open(tmp_path / "run", manifest_path=manifest, new=True).path == tmp_path / "run"


def test_a_folder_of_other_things_is_refused(tmp_path: Path, manifest: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"x")
    with pytest.raises(RefusedError, match="not empty"):
        RunFolder.open(tmp_path / "photos", manifest_path=manifest)


def test_a_file_is_no_folder(tmp_path: Path, manifest: Path) -> None:
    with pytest.raises(RefusedError, match="file"):
        RunFolder.open(manifest, manifest_path=manifest)


def test_an_empty_folder_is_taken(tmp_path: Path, manifest: Path) -> None:
    (tmp_path / "run").mkdir()
    assert RunFolder.open(tmp_path / "run", manifest_path=manifest).path == tmp_path / "run"


def test_looking_needs_a_run(tmp_path: Path, manifest: Path) -> None:
    with pytest.raises(RefusedError, match="not a run folder"):
        RunFolder.open(tmp_path)
    begun(tmp_path / "run", manifest)
    assert RunFolder.open(tmp_path / "run").path == tmp_path / "run"


def test_run_json_comes_back_and_a_broken_one_is_named(tmp_path: Path, manifest: Path) -> None:
    run = begun(tmp_path / "run", manifest, model={"source": "x/猫"}, pixel_settings={"steps": 30})
    record = run.read_run()
    assert record is not None
    assert record["model"] == {"source": "x/猫"}
    assert record["manifest"]["path"] == str(manifest)
    run.run_json.write_text('{"half": ')
    with pytest.raises(RunStoppedError, match=r"run\.json"):
        RunFolder.open(tmp_path / "run", manifest_path=manifest)


# --- settings that alter pixels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"steps": 30}, {"steps": 30}, []),
        ({"steps": 30}, {"steps": 20}, ["steps: 30 -> 20"]),
        ({"loras": [["a", 1.0]]}, {"loras": (("a", 1.0),)}, []),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, ["a: 1 -> 2", "b: 1 -> 2"]),
        ({}, {"dtype": "bfloat16"}, ["dtype: not set -> bfloat16"]),
        ({"dtype": "bfloat16"}, {}, ["dtype: bfloat16 -> not set"]),
        ({}, {"image_format": "jpeg"}, ["image_format: png -> jpeg"]),
        ({"image_format": "webp"}, {}, ["image_format: webp -> png"]),
        ({}, {"compile": True}, ["compile: false -> true"]),
        ({}, {"image_format": "png", "vae_tiling": False}, []),
        ({"x": None}, {}, []),
        ({"guidance": 4}, {"guidance": 4.0}, []),
    ],
    ids=["equal", "changed", "tuples are lists", "sorted", "added", "removed",
         "a default has its name", "back to a default", "a switch has its default", "a default said is no difference", "unset is absent", "4 is 4.0"],
)
def test_differences_are_told_by_name(old: dict[str, object], new: dict[str, object], lines: list[str]) -> None:
    assert pixel_diff(old, new) == lines


def test_changed_pixel_settings_are_refused_with_the_differences(tmp_path: Path, manifest: Path) -> None:
    run = begun(tmp_path / "run", manifest, pixel_settings={"steps": 30, "dtype": "float32"})
    run.check_pixel_settings({"steps": 30, "dtype": "float32"})
    with pytest.raises(RefusedError, match="steps: 30 -> 28") as caught:
        run.check_pixel_settings({"steps": 28, "dtype": "float32"})
    assert "--new" in str(caught.value)
    assert "dtype" not in str(caught.value)


# --- the lock -------------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from batchgen.runlock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder_process(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    process = holder_process(tmp_path / "run.lock")
    try:
        with pytest.raises(RunLockedError, match=f"process {process.pid} on ") as caught:
            RunLock(tmp_path / "run.lock").acquire()
        assert caught.value.exit_code == 1
        assert str(process.pid) in caught.value.holder
    finally:
        stop(process)


def test_a_killed_holders_lock_is_taken_over_at_once(tmp_path: Path) -> None:
    stop(process := holder_process(tmp_path / "run.lock"))
    assert (tmp_path / "run.lock").exists()
    with RunLock(tmp_path / "run.lock") as lock:
        assert lock.taken_over is not None
        assert lock.taken_over.pid == process.pid
    assert os.listdir(tmp_path) == []


def test_a_killed_holder_that_nobody_collected_is_dead(tmp_path: Path) -> None:
    process = holder_process(tmp_path / "run.lock")
    process.kill()
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, still a zombie
        with RunLock(tmp_path / "run.lock") as lock:
            assert lock.taken_over is not None
    finally:
        process.communicate()


def write_lock(path: Path, **changes: object) -> Holder:
    holder = replace(Holder.me(), token="another", **changes)
    path.write_text(json.dumps(asdict(holder)))
    return holder


def old(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


DEATHS = {
    "this process, alive": ({}, 0, True),
    "no such process": ({"pid": 2**22 - 3}, 0, False),
    "the pid was used again": ({"process_start": "1"}, 0, False),
    "the machine was started again": ({"boot_id": "another boot"}, 0, False),
    "another machine, heartbeat fresh": ({"host": "elsewhere", "boot_id": "b"}, 0, True),
    "another machine, heartbeat old": ({"host": "elsewhere", "boot_id": "b"}, 3600, False),
    "another container, heartbeat fresh": ({"pid_space": "pid:[1]", "pid": 1}, 0, True),
    "another container, heartbeat old": ({"pid_space": "pid:[1]", "pid": 1}, 3600, False),
}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="process start times are Linux's")
@pytest.mark.parametrize(("changes", "age", "alive"), DEATHS.values(), ids=DEATHS.keys())
def test_who_counts_as_alive(tmp_path: Path, changes: dict[str, object], age: float, alive: bool) -> None:
    path = tmp_path / "run.lock"
    holder = write_lock(path, **changes)
    old(path, age)
    assert is_alive(path, holder) is alive
    if alive:
        with pytest.raises(RunLockedError):
            RunLock(path).acquire()
    else:
        with RunLock(path) as lock:
            assert read_holder(path) == lock.holder


def test_an_unreadable_lock_is_held_until_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text("{half")
    with pytest.raises(RunLockedError):
        RunLock(path).acquire()
    old(path, 3600)
    with RunLock(path):
        pass


def test_the_heartbeat_goes_on_while_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlock, "HEARTBEAT_SECONDS", 0.02)
    path = tmp_path / "run.lock"
    with RunLock(path):
        old(path, 3600)
        deadline = time.monotonic() + 10
        while path.stat().st_mtime < time.time() - 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > time.time() - 100


def test_a_lock_is_released_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with RunLock(path):
        path.unlink()
        write_lock(path)
    assert path.exists()


def test_of_many_that_try_at_once_one_gets_it(tmp_path: Path) -> None:
    """Over a dead run's lock, so that taking over is raced too."""
    path = tmp_path / "run.lock"
    write_lock(path, pid=2**22 - 3)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom batchgen.errors import RunLockedError\nfrom batchgen.runlock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\nsys.stdin.readline()\n"
        "try:\n    lock.acquire()\n    print('got', flush=True)\n    time.sleep(60)\nexcept RunLockedError:\n    print('refused', flush=True)\n"
    )
    tries = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    try:
        for process in tries:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.stdout.readline().strip() for process in tries if process.stdout is not None]
    finally:
        for process in tries:
            stop(process)
    assert sorted(answers) == ["got"] + ["refused"] * 5


def test_a_takeover_waits_for_the_dead_runs_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.lock"
    write_lock(path, pid=2**22 - 3)
    handle = hold_for_worker(path)
    assert handle is not None
    monkeypatch.setattr(runlock, "_ORPHAN_SECONDS", 0.1)
    with pytest.raises(RunLockedError, match="has not ended"):
        RunLock(path).acquire()
    os.close(handle)
    with RunLock(path):
        pass
