"""A finished run folder without a run: jobs, files and events written through the product's own journal and outputs."""

from __future__ import annotations

import json
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


def job(number: int, prompt: str, *, output: str | None = None, **more: object) -> Job:
    fields = {"width": 64, "height": 64, "steps": 4, "guidance": 0.0, **more}
    return Job(
        key=f"{number:032x}", index=number, row=number + 2, k=0, id=f"job-{number}", prompt=prompt, negative_prompt=None,
        seed=2**64 - 1 - number, seed_source="row", output=output or f"{number:06d}.png", **fields,  # type: ignore[arg-type]
    )


def finished_run(path: Path, prompts: Sequence[str], *, failed: Sequence[int] = (), clips: Sequence[int] = ()) -> RunFolder:
    """A run folder whose jobs are done but for those in `failed`; `clips` have an MP4's name (and are none)."""
    folder = RunFolder(path.absolute())
    folder.prepare()
    folder.run_json.write_text(json.dumps({"model": {"source": "builtin", "revision": "0" * 40}, "plan": PLAN}))
    (folder.tables / "measured.json").write_text(json.dumps(MEASURED))
    jobs = [job(number, text, output=f"{number:06d}.mp4" if number in clips else None) for number, text in enumerate(prompts)]
    with Journal.open(folder.journal) as journal:
        journal.begin_run()
        journal.ingest(jobs)
        events: list[Event] = [_ended(folder, item, item.index in failed) for item in jobs]
        events += [MemorySample(0, "denoise", 2**30 + number * 2**20, 0, 0) for number in range(4)]
        journal.record(events)
        journal.end_run(None)
    return folder


def _ended(folder: RunFolder, item: Job, failed: bool) -> Event:
    if failed:
        return JobFailed(0, item.key, "non-finite", "denoise", "<img src=x onerror=alert(1)> is not a number")
    path = folder.outputs / item.output
    if path.suffix == ".mp4":
        path.write_bytes(b"\0" * 64)
        size, sha = 64, "0" * 64
    else:
        pixels = np.full((64, 64, 3), (item.index * 40 % 256, 120, 200), np.uint8)
        size, sha = write_image(pixels, path, {"prompt": item.prompt}, "png", {})
    return OutputDone(0, item.key, item.output, size, sha, 4, 0.5, "{}")
