"""Video lists as people run them: every clip has exactly the size, length and rate of its row, whatever ended the run in between."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import pytest
from commandline import batchgen, environment, write_csv
from PIL import Image

from batchgen.outputs.files import is_temp
from batchgen.outputs.metadata import read_settings
from conftest import TinyFolder

TESTS = Path(__file__).parents[1]
SIZES = ((64, 64), (96, 64), (64, 96))
FRAMES = (5, 9)
RATES = {"16": Fraction(16), "23.976": Fraction(24000, 1001)}


def twenty_five_rows() -> list[dict[str, str]]:
    """Every size with every length and both rates; a sixth with a negative prompt."""
    rows = []
    for number in range(25):
        width, height = SIZES[number % 3]
        rows.append({
            "prompt": f"a red circle {number}", "width": str(width), "height": str(height), "num_frames": str(FRAMES[number // 3 % 2]),
            "fps": list(RATES)[number % 2], "steps": "1", "seed": str(number), "negative_prompt": "blurry" if number % 6 == 0 else "",
        })
    return rows


def decoded(path: Path) -> tuple[int, int, int, Fraction]:
    """Width, height, frames that really decode, and their rate: the stream's, which all time stamps keep."""
    with av.open(str(path)) as clip:
        stream = clip.streams.video[0]
        frames = list(clip.decode(stream))
        assert stream.average_rate is not None
        assert [frame.pts * frame.time_base * stream.average_rate for frame in frames] == list(range(len(frames)))  # type: ignore[operator]
        assert {(frame.width, frame.height) for frame in frames} == {(stream.width, stream.height)}
        return stream.width, stream.height, len(frames), stream.average_rate


def jobs_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "tables" / "jobs.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.skipif(sys.platform != "linux", reason="ends processes as Linux does")
def test_a_wan_list_cut_off_while_it_encodes_resumes_to_exact_clips(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    rows = twenty_five_rows()
    manifest = write_csv(tmp_path / "clips.csv", rows)
    run = ["run", manifest, "--model", tiny_folder("wan21"), "-o", "out", "--quiet"]
    command = [sys.executable, TESTS / "factory_run.py", "special_engines:killed_while_encoding", *run]
    killed = subprocess.run(
        [*map(str, command)], cwd=tmp_path, env=environment({"PYTHONPATH": str(TESTS)}), capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    outputs = tmp_path / "out" / "outputs"
    assert [path for path in outputs.iterdir() if is_temp(path.name)], "the kill did not hit a clip in the making"
    finished = {path.name: path.stat().st_mtime_ns for path in outputs.glob("*.mp4")}
    assert len(finished) < 25
    for name in finished:  # what stands under its name is whole
        assert decoded(outputs / name)[2] in FRAMES

    said = batchgen(*run, folder=tmp_path)
    assert said.code == 0, said
    jobs = jobs_of(tmp_path / "out")
    assert sorted(path.name for path in outputs.iterdir()) == sorted(job["output"] for job in jobs)
    assert {name: (outputs / name).stat().st_mtime_ns for name in finished} == finished
    for row, job in zip(rows, jobs, strict=True):
        assert job["state"] == "done"
        told = {name: job[name] for name in ("width", "height", "num_frames", "fps")}
        assert told == {name: row[name] for name in told} | {"fps": row["fps"] if row["fps"] != "16" else "16.0"}
        shape = (int(job["width"]), int(job["height"]), int(job["num_frames"]), RATES[row["fps"]])
        assert decoded(outputs / job["output"]) == shape


@pytest.mark.parametrize("kind", ["mp4", "webp", "png"])
def test_a_clip_with_sound_in_every_format(kind: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    manifest = write_csv(tmp_path / "c.csv", [{"prompt": "x", "width": "64", "height": "64", "num_frames": "9", "fps": "24", "steps": "1"}])
    command = ("run", manifest, "--model", tiny_folder("ltx2"), "-o", "out", "--quiet", "--video-format", kind)
    said = batchgen(*command, folder=tmp_path)
    assert said.code == 0, said
    (job,) = jobs_of(tmp_path / "out")
    path = tmp_path / "out" / "outputs" / job["output"]
    settings = read_settings(path)
    assert settings is not None
    assert [settings[name] for name in ("prompt", "width", "height", "num_frames", "fps", "steps")] == ["x", 64, 64, 9, 24.0, 1]
    if kind == "mp4":
        assert decoded(path) == (64, 64, 9, Fraction(24))
        with av.open(str(path)) as clip:
            heard = sum(frame.samples for frame in clip.decode(audio=0))
            assert heard > 0
    elif kind == "webp":
        with Image.open(path) as clip:
            assert (clip.size, clip.n_frames) == ((64, 64), 9)
        assert settings["flags"] == ["no sound"]
        assert "no sound" in job["flags"]
    else:
        assert [frame.name for frame in sorted(path.iterdir())] == [*(f"{number:05d}.png" for number in range(9)), "sound.wav"]
        made = {frame.name: frame.stat().st_mtime_ns for frame in path.iterdir()}
        again = batchgen(*command, "--verify", folder=tmp_path)  # and the folder is known for whole
        assert again.code == 0, again
        assert {frame.name: frame.stat().st_mtime_ns for frame in path.iterdir()} == made
