"""The journal against the disk: clips and folders of frames as well as pictures, after a crash and after a loss."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchgen.errors import RefusedError
from batchgen.events import OutputDone
from batchgen.jobs import Job
from batchgen.journal import Journal
from batchgen.outputs.files import temp_path
from batchgen.outputs.image import write_image
from batchgen.outputs.metadata import RECORD, settings_for
from batchgen.outputs.space import SpaceForecast, forecast
from batchgen.outputs.video import write_video
from batchgen.reconcile import open_journal, reconcile, space
from batchgen.runfolder import RunFolder
from scripted import picture, written
from scripted_run import make_job, make_jobs

PNG = b"\x89PNG\r\n\x1a\n"
CLIP = {"mp4": ".mp4", "webp": ".webp", "png": ""}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.prepare()
    return run


def filled(folder: RunFolder, journal: Journal, count: int) -> list[Job]:
    jobs = make_jobs(count)
    journal.ingest(jobs)
    journal.record([written(folder.outputs, job) for job in jobs])
    return jobs


def clips(kind: str) -> list[Job]:
    jobs = [make_job(name, index, num_frames=4, fps=8.0) for index, name in enumerate(("a", "b", "c"))]
    return [replace(job, output=job.output.removesuffix(".png") + CLIP[kind]) for job in jobs]


def write_clip(folder: RunFolder, job: Job, kind: str) -> OutputDone:
    frames = np.random.default_rng(job.seed % 1000).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    settings = settings_for(job, {}, 1)
    size, digest = write_video(frames, folder.outputs / job.output, settings, fps=8.0, video_format=kind)
    return OutputDone(0, job.key, job.output, size, digest, 1, 0.1, settings[RECORD])


@pytest.mark.parametrize("kind", CLIP)
def test_a_cut_clip_is_redone_and_no_other(folder: RunFolder, kind: str) -> None:
    jobs = clips(kind)
    journal, _ = open_journal(folder)
    with journal:
        journal.ingest(jobs)
        journal.record([write_clip(folder, job, kind) for job in jobs])
        target = folder.outputs / jobs[1].output
        torn = target / "00002.png" if kind == "png" else target
        torn.write_bytes(torn.read_bytes()[:-40])
        found = reconcile(folder, journal, after_crash=False)
        assert (found.checked, found.redone, found.adopted) == (3, [jobs[1].output], [])
        assert [job.id for job in journal.take(9, 0)[1]] == ["b"]
        assert not target.exists()
        assert (folder.aside / jobs[1].output).exists()


@pytest.mark.parametrize("kind", CLIP)
def test_clips_are_found_again_without_a_journal(folder: RunFolder, kind: str) -> None:
    jobs = clips(kind)
    for job in jobs:
        write_clip(folder, job, kind)
    journal, found = open_journal(folder)
    with journal:
        assert found == 3
        assert journal.ingest(jobs).recovered == 3
        assert sorted(reconcile(folder, journal, after_crash=False).adopted) == [job.output for job in jobs]
        assert journal.counts()["done"] == 3


def test_after_a_crash_only_the_last_minute_is_hashed(folder: RunFolder) -> None:
    journal, _ = open_journal(folder)
    with journal:
        jobs = filled(folder, journal, 6)
        for age, job in zip((7200, 3600, 300, 59, 30, 0), jobs, strict=True):
            journal._db.execute("UPDATE jobs SET written_at = ? WHERE key = ?", (time.time() - age, job.key))
        found = reconcile(folder, journal, after_crash=True)
        assert (found.checked, found.hashed, found.redone) == (6, 3, [])
        assert reconcile(folder, journal, after_crash=False).hashed == 0
        assert reconcile(folder, journal, after_crash=False, verify=True).hashed == 6


def test_zeros_that_a_power_cut_left_are_found(folder: RunFolder) -> None:
    """Of the right length, as a file system without ordered data leaves them."""
    journal, _ = open_journal(folder)
    with journal:
        jobs = filled(folder, journal, 3)
        path = folder.outputs / jobs[2].output
        path.write_bytes(bytes(path.stat().st_size))
        found = reconcile(folder, journal, after_crash=True)
        assert (found.redone, found.moved_aside) == ([jobs[2].output], [jobs[2].output])
        assert journal.counts()["pending"] == 1


def test_temp_files_of_a_killed_run_are_swept(folder: RunFolder) -> None:
    journal, _ = open_journal(folder)
    with journal:
        filled(folder, journal, 1)
        temp_path(folder.outputs).write_bytes(b"half")
        assert reconcile(folder, journal, after_crash=True).swept == 1
    assert os.listdir(folder.outputs) == ["000000-job0.png"]


def test_a_picture_that_was_packed_better_is_kept_as_it_is(folder: RunFolder) -> None:
    """Another size and hash, but whole and with its own settings inside: no reason to render it again."""
    journal, _ = open_journal(folder)
    with journal:
        (job,) = filled(folder, journal, 1)
        path = folder.outputs / job.output
        path.unlink()
        write_image(picture(job), path, settings_for(job, {}, 1) | {"note": "packed"}, options={"compress_level": 9})
        found = reconcile(folder, journal, after_crash=False)
        assert (found.redone, found.adopted) == ([], [job.output])
        assert journal.counts()["done"] == 1


def test_a_done_picture_that_somebody_replaced_is_kept_aside(folder: RunFolder) -> None:
    journal, _ = open_journal(folder)
    with journal:
        (job,) = filled(folder, journal, 1)
        (folder.outputs / job.output).write_bytes(b"painted over by hand")
        found = reconcile(folder, journal, after_crash=False)
        assert (found.redone, found.moved_aside) == ([job.output], [job.output])
        assert (folder.aside / job.output).read_bytes() == b"painted over by hand"


def test_what_was_set_aside_twice_is_there_twice(folder: RunFolder) -> None:
    journal, _ = open_journal(folder)
    with journal:
        (job,) = make_jobs(1)
        journal.ingest([job])
        for content in (PNG + b"one", PNG + b"two"):
            (folder.outputs / job.output).write_bytes(content)
            reconcile(folder, journal, after_crash=False)
    assert sorted(path.read_bytes() for path in folder.aside.iterdir()) == [PNG + b"one", PNG + b"two"]


@pytest.mark.parametrize("place", ["a folder", "a dangling link", "a text"])
def test_whatever_stands_under_a_planned_name_is_never_touched(folder: RunFolder, place: str) -> None:
    (job,) = make_jobs(1)
    path = folder.outputs / job.output
    if place == "a folder":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif place == "a dangling link":
        path.symlink_to("/nowhere/at/all")
    else:
        path.write_text("mine")
    journal, _ = open_journal(folder)
    with journal:
        journal.ingest([job])
        with pytest.raises(RefusedError, match="--overwrite"):
            reconcile(folder, journal, after_crash=False)
    assert os.path.lexists(path)
    assert not folder.aside.exists()


def test_running_jobs_of_a_killed_supervisor_wait_again_with_no_attempt_counted(folder: RunFolder) -> None:
    journal, _ = open_journal(folder)
    with journal:
        journal.ingest(make_jobs(3))
        journal.take(2, 0)
    journal, _ = open_journal(folder)
    with journal:
        reconcile(folder, journal, after_crash=True)
        assert journal.counts()["pending"] == 3
        assert {row["attempts"] for row in journal.rows()} == {0}


def test_space_is_forecast_from_sizes_and_then_from_what_was_made(folder: RunFolder) -> None:
    journal, _ = open_journal(folder)
    with journal:
        jobs = make_jobs(4, width=1024, height=1024)
        journal.ingest(jobs)
        before = space(folder, journal)
        assert (before.jobs, before.measured) == (4, False)
        assert 4 * 2 * 1024 * 1024 <= before.needed_bytes <= 4 * 3 * 1024 * 1024
        journal.record(OutputDone(0, jobs[0].key, jobs[0].output, 1_500_000, "00", 1, 0.1, ""))
        assert space(folder, journal) == SpaceForecast(4_500_000, before.free_bytes, 3, True) or space(folder, journal).measured


def test_a_forecast_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = forecast(make_jobs(2, width=64, height=64), 2_000_000_000, tmp_path / "a" / "b")
    assert found.free_bytes > 0
    assert not found.enough
    assert found.warning is not None
    assert "2,000,000,000 outputs" in found.warning
    assert forecast([], 0, tmp_path).needed_bytes == 0
