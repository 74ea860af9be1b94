"""A finished run folder without a run: jobs, files and events written through the product's own journal and outputs."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchgen.events import Event, JobFailed, MemorySample, OutputDone
from batchgen.jobs import Job
from batchgen.journal import Journal
from batchgen.outputs.image import write_image
from batchgen.runfolder import RunFolder

PLAN = {
    "predicted": {"peak_device_bytes": 2**30},
    "placements": {
        "text_encoder": {
            "mode": "component-offload", "group": "text_encoder", "by": "task", "reason": "24 < 45 <b>GiB</b>", "bytes": 2**30,
        },
        "vae": {"mode": "resident", "group": "vae", "by": "default", "reason": "nothing else was asked", "bytes": None},
    },
}
MEASURED = {
    "components": {"text_encoder": {"loads": 1, "moves_in": 2, "moved_bytes": 2**31, "calls": 40, "compute_seconds": 3.5}},
    "stages": {
        "denoise": {"batches": 5, "largest_batch": 8, "jobs": 40, "seconds": 60.0},
        "decode": {"batches": 5, "jobs": 40, "seconds": 20.0},
    },
    "advice": ["vae could have stayed <resident>"],
}


REASON = "<img src=x onerror=alert(1)> is not a number"


def job(number: int, prompt: str, *, output: str | None = None, **more: object) -> Job:
    fields = {"width": 64, "height": 64, "steps": 4, "guidance": 0.0, **more}
    return Job(
        key=f"{number:032x}", index=number, row=number + 2, k=0, id=f"job-{number}", prompt=prompt, negative_prompt=None,
        seed=2**64 - 1 - number, seed_source="row", output=output or f"{number:06d}.png", **fields,  # type: ignore[arg-type]
    )


def finished_run(
    path: Path, prompts: Sequence[str], *, failed: Sequence[int] = (), clips: Sequence[int] = (), reason: str = REASON,
) -> RunFolder:
    """A run folder whose jobs are done but for those in `failed`; those in `clips` are MP4s."""
    folder = RunFolder(path.absolute())
    folder.prepare()
    folder.run_json.write_text(json.dumps({"model": {"source": "builtin", "revision": "0" * 40}, "plan": PLAN}))
    (folder.tables / "measured.json").write_text(json.dumps(MEASURED))
    jobs = [job(number, text, output=f"{number:06d}.mp4" if number in clips else None) for number, text in enumerate(prompts)]
    with Journal.open(folder.journal) as journal:
        journal.begin_run()
        journal.ingest(jobs)
        events: list[Event] = [_ended(folder, item, reason.format(item.index) if item.index in failed else None) for item in jobs]
        events += [MemorySample(0, "denoise", 2**30 + number * 2**20, 0, 0) for number in range(4)]
        journal.record(events)
        journal.end_run(None)
    return folder


def skip_rows(folder: RunFolder, count: int) -> None:
    """As `--skip-invalid` leaves them: `count` rows that became no job, the first of them in line 10."""
    with Journal.open(folder.journal) as journal:
        journal.set_skipped([(10 + number, None, "steps: 'many' is | not a number") for number in range(count)])


def without_rows(folder: RunFolder, gone: Sequence[int], *, complete: bool = True) -> None:
    """Takes the manifest over again without some rows; not `complete`: they are left out by a limit."""
    with Journal.open(folder.journal) as journal:
        jobs = [job(row["index"], row["prompt"], output=row["output"]) for row in journal.rows()]
        journal.ingest([item for item in jobs if item.index not in gone], complete=complete)


def as_a_night(folder: RunFolder) -> None:
    """Gives the run the times of a night: stopped after four hours, resumed a day later for two, by two workers."""
    hour, begin, later = 3600.0, 1_000_000.0, 1_100_000.0
    with sqlite3.connect(folder.journal) as db:
        db.executescript("DELETE FROM runs; DELETE FROM memory; DELETE FROM work;")
        db.execute("INSERT INTO runs VALUES (1, ?, ?, 'SIGINT', 'here', 1, 0)", (begin, begin + 4 * hour))
        db.execute("INSERT INTO runs VALUES (2, ?, ?, NULL, 'here', 2, 0)", (later, later + 2 * hour))
        for run, start, hours in ((1, begin, 4), (2, later, 2)):
            for worker in range(2):
                db.executemany("INSERT INTO work VALUES (?, ?, ?, 'load', ?, NULL, NULL, ?, 0, 0)", [
                    (run, start + 90, worker, "text_encoder", 80.0), (run, start + 300, worker, "transformer", 200.0),
                ])
                _windows(db, run, worker, start + 300 + 60 * worker, start + hours * hour)
        done = [row[0] for row in db.execute("SELECT rowid FROM jobs WHERE state = 'done' ORDER BY idx")]
        for number, row in enumerate(done):
            share = 6 * hour * (number + 1) / (len(done) + 1)
            at = begin + share if share < 4 * hour else later + share - 4 * hour
            db.execute("UPDATE jobs SET written_at = ? WHERE rowid = ?", (at, row))


def _windows(db: sqlite3.Connection, run: int, worker: int, at: float, end: float) -> None:
    window = 0
    while at + 1500 < end:
        for stage, seconds, host, device in (("text_encoder", 60.0, 30, 17), ("denoise", 1200.0, 24, 21), ("decode", 120.0, 24, 9)):
            db.execute("INSERT INTO work VALUES (?, ?, ?, 'move', 'x', NULL, NULL, 15.0, 0, 0)", (run, at + 15, worker))
            batches = 10 if stage == "denoise" else 1
            for _ in range(batches):
                at += 15.0 / batches + seconds / batches
                db.execute("INSERT INTO work VALUES (?, ?, ?, 'batch', ?, '1024x1024', ?, ?, 4, 4)",
                           (run, at, worker, stage, window, seconds / batches))
                db.execute("INSERT INTO memory VALUES (?, ?, ?, 1, ?, ?, ?, ?)",
                           (run, at, worker, stage, host * 2**30, device * 2**30, device * 2**30))
        window += 1


def _clip(path: Path) -> tuple[int, str]:
    """Half a second of a moving bar; where there is no encoder, bytes that are no clip."""
    if importlib.util.find_spec("av") is None:
        path.write_bytes(b"\0" * 64)
        return 64, "0" * 64
    from batchgen.outputs.video import write_video

    frames = np.zeros((8, 64, 64, 3), np.uint8)
    for number in range(8):
        frames[number, :, 8 * number : 8 * number + 8] = 255
    return write_video(frames, path, {"prompt": "a bar"}, fps=16.0)


def _ended(folder: RunFolder, item: Job, reason: str | None) -> Event:
    if reason is not None:
        return JobFailed(0, item.key, "non-finite", "denoise", reason)
    path = folder.outputs / item.output
    if path.suffix == ".mp4":
        size, sha = _clip(path)
    else:
        pixels = np.full((64, 64, 3), (item.index * 40 % 256, 120, 200), np.uint8)
        size, sha = write_image(pixels, path, {"prompt": item.prompt}, "png", {})
    return OutputDone(0, item.key, item.output, size, sha, 4, 0.5, "{}")
