"""Tiny model folders that the end-to-end tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    tiny.qwen_image(str(folder))
    return folder


@pytest.fixture(scope="session")
def z_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-z"
    tiny.z_image(str(folder))
    return folder
