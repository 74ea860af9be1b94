"""What the benchmarks share: the tests' own modules at hand, runs on one thread, and a record for each in results/benchmarks/."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
RECORDS = ROOT / "results" / "benchmarks"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # of a process, and nothing fetched
MEASURED_ON = {"python": platform.python_version(), "machine": platform.machine()}

sys.path.insert(0, str(TESTS))


def parser_for(doc: str) -> argparse.ArgumentParser:
    """A benchmark's options, described by the first line of its docstring."""
    return argparse.ArgumentParser(description=doc.splitlines()[0])


def versions(names: Iterable[str] = ("torch", "diffusers", "transformers")) -> dict[str, str]:
    return {name: metadata.version(name) for name in names}


def write_record(name: str, record: Mapping[str, Any], *, show: bool = False) -> None:
    """Writes results/benchmarks/NAME.json; `show` prints it too."""
    text = json.dumps(record, indent=2)
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if show:
        print(text)


def cpu_seconds(arguments: list[str], environment: Mapping[str, str]) -> float:
    """User and system time of one Python process and its children. Raises CalledProcessError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
