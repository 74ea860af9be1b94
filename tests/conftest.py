"""What several parts' tests share: tiny model folders, made once a session, torch on one thread, and the switch for a GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

# two threads beside other work can be many times slower than one; and no test asks a hub
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TinyFolder = Callable[[str], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-gpu", action="store_true", help="run the tests that need a CUDA device")
    parser.addoption("--run-long", action="store_true", help="run the tests that repeat a quicker one's check over more cases")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {"gpu": "needs a CUDA device: --run-gpu", "long": "repeats a quicker test over more cases: --run-long"}
    for mark, reason in reasons.items():
        if config.getoption(f"--run-{mark}"):
            continue
        for item in items:
            if mark in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    # What the test files have imported stays to the end: a full collection need not walk it again each time.
    # Hypothesis looks for referrers when it is imported, at the end of a session at the latest, and would find no frozen ones.
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """`tiny_folder("z_image")`: a diffusers folder of that family with random weights; see tests/tiny.py.

    Made at first use and shared by the session: copy it before changing anything in it.
    """
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            import tiny

            made[family] = tmp_path_factory.mktemp("tiny") / family
            getattr(tiny, family)(made[family])
        return made[family]

    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch = sys.modules.get("torch")  # loads none by itself
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _hear_signals() -> None:
    """Background jobs of some shells ignore SIGINT, and nohup SIGHUP; processes begun by tests would inherit that and never stop."""
    for name in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(name) is signal.SIG_IGN:
            signal.signal(name, signal.default_int_handler if name is signal.SIGINT else signal.SIG_DFL)


if threading.current_thread() is threading.main_thread():
    _hear_signals()
