"""--attention-backend: set on the denoisers alone, checked before a model is loaded, refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import enginekit
from batchgen.cli.run_options import ATTENTION_BACKENDS
from batchgen.errors import ModelError
from batchgen.execute.attention import check_attention


def test_every_name_is_the_dispatchers() -> None:
    assert set(ATTENTION_BACKENDS) <= {backend.value for backend in AttentionBackendName}


def test_the_denoiser_takes_the_backend_and_the_picture_stays(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder, jobs = tiny_folder("qwen_image"), [enginekit.make_job(0, "a red circle", steps=2)]
    plain = enginekit.run_jobs(folder, tmp_path / "plain", jobs)
    ran = enginekit.run_jobs(folder, tmp_path / "math", jobs, attention_backend="_native_math")
    assert not ran.failed
    assert ran.engine is not None
    modules = ran.engine.components.modules
    used = {getattr(part.processor, "_attention_backend", None) for part in modules["transformer"].modules() if hasattr(part, "processor")}
    assert used == {AttentionBackendName._NATIVE_MATH}
    assert _AttentionBackendRegistry.get_active_backend()[0] == AttentionBackendName.NATIVE, "other modules keep their own"
    assert np.abs(ran.floats[jobs[0].key] - plain.floats[jobs[0].key]).max() * 255 <= 1


def test_a_backend_that_is_not_installed_is_refused_at_the_start() -> None:
    with pytest.raises(ModelError, match="attention backend flash cannot be used"):
        check_attention("flash")
