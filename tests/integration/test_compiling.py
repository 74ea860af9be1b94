"""--compile: the denoiser's repeated blocks alone, the same picture, and a refusal where its weights move."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import enginekit
from batchgen.errors import ModelError


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks_paint_the_same_picture(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # captured and run as on a card, but without the minutes that generating C++ for the CPU takes
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    folder, jobs = tiny_folder("qwen_image"), [enginekit.make_job(number, "a red circle", steps=2) for number in range(2)]
    plain = enginekit.run_jobs(folder, tmp_path / "plain", jobs)
    ran = enginekit.run_jobs(folder, tmp_path / "compiled", jobs, compile_blocks=True)
    assert not ran.failed
    assert ran.engine is not None
    modules = ran.engine.components.modules
    compiled = {name for name, module in modules.items() for part in module.modules() if part._compiled_call_impl is not None}
    assert compiled == {"transformer"}
    for job in jobs:
        assert np.abs(ran.floats[job.key] - plain.floats[job.key]).max() * 255 <= 1
    assert "transformer" in ran.engine.residency.fixed


@pytest.mark.parametrize("mode", ["component-offload", "layerwise-offload"])
def test_weights_that_move_are_refused(mode: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("qwen_image")
    plan = enginekit.make_plan(folder, modes={"transformer": mode})
    with pytest.raises(ModelError, match=f"transformer to stay on the device, and it is {mode}"):
        enginekit.run_jobs(folder, tmp_path, [enginekit.make_job(0, "a red circle")], plan=plan, compile_blocks=True)
