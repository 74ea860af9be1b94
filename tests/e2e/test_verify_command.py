"""`batchgen verify` as a user runs it: what it says, its exit code, its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from commandline import batchgen, environment

from reportkit import finished_run, without_rows

TESTS = Path(__file__).parents[1]


def test_a_changed_byte_a_missing_file_and_a_stranger_are_named(tmp_path):
    run = finished_run(tmp_path / "run", ["a", "b", "c", "d"], failed=[3])
    said = batchgen("verify", "run", folder=tmp_path)
    assert said.code == 0, said
    assert "3 outputs" in said.out
    picture = run.outputs / "000000.png"
    data = bytearray(picture.read_bytes())
    data[-30] ^= 1
    picture.write_bytes(data)
    (run.outputs / "000001.png").unlink()
    (run.outputs / "hol\x1b[31miday.png").write_bytes(b"x")
    said = batchgen("verify", "run", folder=tmp_path)
    assert said.code == 3, said
    assert "\x1b" not in said.out
    assert "changed: 000000.png: the bytes are others" in said.out
    assert "missing: 000001.png: " in said.out
    assert "stranger: hol\\x1b[31miday.png: " in said.out
    assert "3 outputs checked" in said.out
    assert "3 findings" in said.out
    found = json.loads(batchgen("verify", "run", "--json", folder=tmp_path).out)
    assert sorted(finding["wrong"] for finding in found["findings"]) == ["changed", "missing", "stranger"]


def test_beside_a_run_that_goes_on_nothing_is_called_wrong(tmp_path):
    spec = {"folder": str(tmp_path / "run"), "jobs": 5000, "batch_size": 4, "script": {"seconds": 0.05}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    run = subprocess.Popen([sys.executable, TESTS / "scripted_run.py", tmp_path / "spec.json"], env=environment({"PYTHONPATH": str(TESTS)}))
    looks = []
    try:
        while len(looks) < 4 and run.poll() is None:
            said = batchgen("verify", "run", "--json", folder=tmp_path)
            if said.code != 2:  # 2: it has not begun
                assert (said.code, json.loads(said.out)["findings"]) == (0, []), said
                looks += [json.loads(said.out)] if json.loads(said.out)["checked"] else []
        said = batchgen("verify", "run", folder=tmp_path)
        assert said.code == 0, said
        assert said.out.startswith(f"a run goes on here: process {run.pid} on ")
    finally:
        run.kill()
        run.wait()
    assert len(looks) == 4
    assert all(look["going_on"].startswith(f"process {run.pid} on ") for look in looks)


def test_files_of_rows_no_longer_in_the_manifest_are_a_note_and_no_alarm(tmp_path):
    without_rows(finished_run(tmp_path / "run", ["a", "b", "c"]), [1, 2])
    said = batchgen("verify", "run", folder=tmp_path)
    assert said.code == 0, said
    assert said.out.splitlines()[0] == "2 files of rows no longer in the manifest, not compared"
    assert "1 output checked" in said.out
    assert "nothing is wrong" in said.out
    said = batchgen("verify", "run", "--json", folder=tmp_path)
    assert said.code == 0, said
    found = json.loads(said.out)
    assert (found["checked"], found["vanished"], found["findings"]) == (1, 2, [])
