"""`batchgen verify` as a user runs it: what it says, its exit code, its JSON."""

from __future__ import annotations

import json

from commandline import batchgen

from reportkit import finished_run


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
