"""Small pictures that a run keeps of outputs that leave for a store: made in passing, within a budget, no fault when they fail."""

from __future__ import annotations

import base64
import io
import json
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchgen.journal import Journal
from batchgen.outputs import thumbnails
from batchgen.outputs.delivery import Delivery
from batchgen.outputs.store import Store
from batchgen.outputs.thumbnails import SIDE, Thumbnails, thumbnail
from batchgen.outputs.urls import Location
from batchgen.report.html import write_contact_sheet, write_report
from batchgen.runfolder import RunFolder
from scripted import written
from scripted_run import make_jobs


def noise(path: Path, width: int = 400, height: int = 200) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def page_jobs(folder: RunFolder) -> list[dict[str, Any]]:
    text = write_report(folder).read_text("utf-8")
    match = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)
    assert match is not None
    found: list[dict[str, Any]] = json.loads(match.group(1))
    return found


def test_a_thumbnail_keeps_the_proportions_and_is_none_of_what_is_no_picture(tmp_path: Path) -> None:
    made = thumbnail(noise(tmp_path / "a.png"))
    assert made is not None
    with Image.open(io.BytesIO(made)) as small:
        assert (small.format, small.size) == ("WEBP", (SIDE, SIDE // 2))
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:100])
    (tmp_path / "a.mp4").write_bytes(b"clip")
    assert [thumbnail(tmp_path / name) for name in ("cut.png", "a.mp4", "none.png")] == [None] * 3


def test_no_more_is_kept_than_the_budget_of_pictures_and_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = noise(tmp_path / "a.png")
    size = len(thumbnail(picture) or b"")
    monkeypatch.setattr(thumbnails, "MOST", 3)
    by_number = [Thumbnails(tmp_path / "number") for _ in range(2)]  # two workers
    for number in range(8):
        by_number[number % 2].keep(picture, f"k{number}")
    assert len(list((tmp_path / "number").iterdir())) == 3
    monkeypatch.setattr(thumbnails, "MOST", 1000)
    monkeypatch.setattr(thumbnails, "MOST_BYTES", int(2.5 * size))
    by_bytes = Thumbnails(tmp_path / "bytes")
    for number in range(8):
        by_bytes.keep(picture, f"k{number}")
    assert sum(path.stat().st_size for path in (tmp_path / "bytes").iterdir()) == 2 * size


def test_where_none_can_be_kept_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "thumbs").write_text("a file in its place")
    Thumbnails(tmp_path / "thumbs").keep(noise(tmp_path / "a.png"), "k")
    assert Thumbnails(tmp_path / "thumbs").read("k") is None


def test_the_page_of_outputs_in_a_store_shows_what_passed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "state")
    folder.prepare()
    folder.write_run({"remote": "memory://x"})
    with folder.lock(), Journal.open(folder.journal) as journal:
        jobs = make_jobs(3)
        journal.ingest(jobs)
        delivery = Delivery(Store(Location.parse(f"memory://{uuid.uuid4().hex}")), folder.outputs)
        originals = {}
        for job in jobs[:2]:
            event = written(folder.outputs, job)
            with Image.open(folder.outputs / job.output) as image:
                originals[job.id] = image.size
            journal.record([delivery.send(event)])
    assert not list(folder.outputs.rglob("*.png"))
    found = page_jobs(folder)
    assert ["thumb" in job for job in found] == [True, True, False]
    for job in found[:2]:
        with Image.open(io.BytesIO(base64.b64decode(job["thumb"].partition(",")[2]))) as small:
            assert small.size == originals[job["id"]]
    assert found[0]["href"] == f"outputs/{jobs[0].output}"
    sheet = write_contact_sheet(folder)
    assert sheet is not None
    with Image.open(sheet) as image:
        assert len(image.getcolors(1 << 20) or []) > 10, "empty fields alone have few colours"
    # a shard's page lies with its records
    folder.write_run({"remote": "memory://x", "shard": "1/2"})
    assert page_jobs(folder)[0]["href"] == f"../../outputs/{jobs[0].output}"


def test_a_worker_beside_no_state_folder_keeps_none(tmp_path: Path) -> None:
    (job,) = make_jobs(1)
    outputs = tmp_path / "elsewhere/outputs"
    outputs.mkdir(parents=True)
    event = written(outputs, job)
    Delivery(Store(Location.parse(f"memory://{uuid.uuid4().hex}")), outputs).send(event)
    assert not (tmp_path / "elsewhere/thumbs").exists()
