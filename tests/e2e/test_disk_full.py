"""A disk that is too small: the run stops with the disk's message, nothing half-written, and goes on when there is space."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from batchgen.errors import DiskError
from batchgen.events import OutputDone
from batchgen.journal import Journal
from scripted import picture
from scripted_run import make_jobs

TESTS = Path(__file__).parents[1]
JOBS = 14
FIELDS = {"width": 256, "height": 256}  # noise: about 200 kB a picture

# One mount namespace for both runs; what is to be looked at is copied out of it.
SCRIPT = """
set -u
mount -t tmpfs -o size=2m tmpfs "$1/small" || exit 77
"$2" "$3" "$1/spec.json" > "$1/first.out" 2> "$1/first.err"; echo $? > "$1/first.rc"
"$2" -m batchgen status "$1/small/run" --json > "$1/status.json" || exit 78
mkdir "$1/kept"; cp -a "$1/small/run" "$1/kept/first"
mount -o remount,size=64m "$1/small" || exit 79
"$2" "$3" "$1/spec.json" > "$1/second.out" 2> "$1/second.err"; echo $? > "$1/second.rc"
cp -a "$1/small/run" "$1/kept/second"
"""


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt && mount -o remount,size=2m /mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


def whole_pictures(outputs: Path) -> set[str]:
    """Names of the pictures there; each is whole and has its job's pixels, and nothing else lies beside them."""
    jobs = {job.output: job for job in make_jobs(JOBS, **FIELDS)}
    for path in outputs.iterdir():
        with Image.open(path) as image:
            assert np.array_equal(np.asarray(image), picture(jobs[path.name])), path
    return {path.name for path in outputs.iterdir()}


@pytest.mark.skipif(not can_mount(), reason="no mount namespaces here: the tests with full devices below stand in")
@pytest.mark.parametrize("mode", ["wal", "rollback"])
def test_a_two_megabyte_disk_stops_the_run_and_more_space_lets_it_finish(tmp_path: Path, mode: str) -> None:
    (tmp_path / "small").mkdir()
    spec = {
        "folder": str(tmp_path / "small" / "run"), "jobs": JOBS, "fields": FIELDS, "workers": 2, "window": 4, "mode": mode,
        "script": {"log": str(tmp_path / "log")},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SCRIPT, "sh", str(tmp_path), sys.executable, str(TESTS / "scripted_run.py")],
        env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True, timeout=120, check=False,
    )
    assert ran.returncode == 0, ran.stderr
    error = (tmp_path / "first.err").read_text()
    assert (tmp_path / "first.rc").read_text() == "1\n", error
    assert "the disk is full" in error
    assert "Traceback" not in error

    first = whole_pictures(tmp_path / "kept" / "first" / "outputs")
    assert 0 < len(first) < JOBS
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["jobs"] == JOBS
    assert status["counts"]["done"] + status["counts"]["pending"] + status["counts"]["running"] == JOBS, "a full disk is no job's fault"

    assert (tmp_path / "second.rc").read_text() == "0\n", (tmp_path / "second.err").read_text()
    assert len(whole_pictures(tmp_path / "kept" / "second" / "outputs")) == JOBS
    again = [line.split()[2] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("render ") and "AGAIN" in line]
    assert again == []


def test_a_journal_that_cannot_grow_stops_with_the_disks_message_and_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    jobs = make_jobs(500)
    with Journal.open(path) as journal:
        journal.ingest(jobs[:5])
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(DiskError, match="full"):
            journal.ingest(jobs)
        assert journal.counts()["pending"] == 5
        journal.record(OutputDone(0, jobs[0].key, jobs[0].output, 1, "00", 1, 0.1, ""))
    with Journal.open(path) as journal:
        assert (journal.counts()["done"], journal.damaged) == (1, None)


def test_a_read_only_journal_stops_with_the_disks_message(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal.open(path) as journal:
        journal.ingest(make_jobs(2))
    with Journal.read(path) as journal, pytest.raises(DiskError, match="read-only"):
        journal.record(OutputDone(0, make_jobs(1)[0].key, "x.png", 1, "00", 1, 0.1, ""))


def test_a_full_device_in_place_of_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.symlink_to("/dev/full")
    with pytest.raises((DiskError, sqlite3.Error)) as caught:
        Journal.open(path)
    assert isinstance(caught.value, DiskError)
