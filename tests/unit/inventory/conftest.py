"""Fixtures of stub model folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_models import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def new_model(tmp_path: Path) -> Callable[..., Path]:
    def build(name: str = "model", **options: Any) -> Path:
        return write_model(tmp_path / name, **options)

    return build
