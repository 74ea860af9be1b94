"""Tiny model folders that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def qwen_folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("qwen_image")


@pytest.fixture(scope="session")
def z_folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("z_image")
