"""Two workers on one list with a real model, one of them killed again and again: nothing lost, nothing doubled. (300 jobs: tools/bench.)"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
from commandline import events, pixels, start
from PIL import Image

from batchgen.journal import Journal
from killing import workers_of

JOBS, KILLS = 60, 2


def test_two_workers_render_each_job_once_though_one_is_killed(tmp_path: Path) -> None:
    rows = "".join(f"a red circle {number},{64 if number % 3 else 96},64,1\n" for number in range(JOBS))
    (tmp_path / "list.csv").write_text(f"prompt,width,height,steps\n{rows}")
    options = ("--model", "builtin", "--batch-size", "1", "--workers", "2", "--threads", "1", "--quiet", "--events", "events.jsonl")
    run = start(("run", "list.csv", *options, "-o", "out"), tmp_path)
    outputs = tmp_path / "out/outputs"
    for goal in (JOBS // 4, JOBS // 2):
        while run.poll() is None and (not outputs.is_dir() or len(list(outputs.iterdir())) < goal):
            time.sleep(0.01)
        pids = workers_of(tmp_path / "out")
        assert pids, "a worker lives while jobs are left"
        os.kill(pids[0], signal.SIGKILL)
    _, said = run.communicate(timeout=600)
    assert run.returncode == 0, said
    told = Counter(event["key"] for event in events(tmp_path / "events.jsonl", "OutputDone"))
    assert (len(told), set(told.values())) == (JOBS, {1})
    assert len(events(tmp_path / "events.jsonl", "WorkerDied")) == KILLS
    assert {event["worker"] for event in events(tmp_path / "events.jsonl", "OutputDone")} == {0, 1}
    with Journal.read(tmp_path / "out/journal.sqlite") as journal:
        rows_told = list(journal.rows())
        assert Counter(row["state"] for row in rows_told) == {"done": JOBS}
        assert {row["output"] for row in rows_told} == {path.name for path in outputs.iterdir()}
        for row in rows_told:
            assert pixels(outputs / row["output"]).shape == (64, row["width"], 3)
            with Image.open(outputs / row["output"]) as image:
                assert f'"key":"{row["key"]}"' in image.text["batchgen"]  # type: ignore[attr-defined]
    assert list((tmp_path / "out/spool").iterdir()) == [], "latents and the workers' shared weights are gone with the run"
    assert len({pixels(path).tobytes() for path in outputs.iterdir()}) == JOBS, "each has noise of its own"
    assert np.asarray(pixels(next(outputs.iterdir()))).std() > 0
