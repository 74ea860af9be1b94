"""`batchgen check --model`: the rules come from the model's own configs, the prompt limits from its own tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli.main import run

TinyFolder = Callable[[str], Path]


@pytest.fixture
def found(tiny_folder: TinyFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def check(family: str, manifest: str, *words: str) -> tuple[int, dict[str, Any]]:
        (tmp_path / "a.csv").write_text(manifest, encoding="utf-8")
        code = run(["check", str(tmp_path / "a.csv"), "--model", str(tiny_folder(family)), "--json", *words])
        return code, json.loads(capsys.readouterr().out)

    return check


def test_sizes_follow_the_vae_and_the_patches(found: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, report = found("flux", "prompt,width,height\na cat,64,64\na dog,65,64\n")
    assert code == 2
    (fault,) = report["faults"]
    assert (fault["row"], fault["column"], fault["value"]) == (3, "width", "65")
    code, report = found("flux", "prompt,width,height\na cat,64,64\na dog,65,64\n", "--snap")
    assert (code, [(shape["width"], shape["jobs"]) for shape in report["shapes"]]) == (0, [(64, 2)])


def test_frames_follow_the_vaes_compression_in_time(found: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, report = found("wan21", "prompt,width,height,frames\na train,64,64,5\na train,64,64,6\n")
    assert code == 2
    (fault,) = report["faults"]
    assert (fault["row"], fault["column"], fault["value"]) == (3, "frames", "6")
    assert "5" in fault["message"]


def test_one_of_two_encoders_that_reads_all_makes_it_no_loss(found: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, report = found("flux", f"prompt\na cat\n{'cat ' * 90}\n{'cat ' * 600}\n")
    assert code == 0
    kinds = {notice["kind"]: notice for notice in report["warnings"]}
    assert kinds["truncated"]["rows"] == [4]
    assert "lost: " in kinds["truncated"]["examples"][0]
    assert kinds["partly-read"]["rows"] == [3]
    code, report = found("flux", f"prompt\na cat\n{'cat ' * 600}\n", "--on-truncate", "error")
    assert (code, [fault["row"] for fault in report["faults"]]) == (2, [3])
