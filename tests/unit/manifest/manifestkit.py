"""What the manifest tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import Fault, ManifestError
from batchgen.jobs import Job
from batchgen.manifest import JobDefaults, ManifestOptions, check, jobs

CASES = Path(__file__).parents[2] / "cases" / "manifests"


def options(**given: Any) -> ManifestOptions:
    """ManifestOptions; fields of JobDefaults may stand among them."""
    defaults = {name: given.pop(name) for name in JobDefaults.__dataclass_fields__ if name in given}
    return ManifestOptions(defaults=JobDefaults(**defaults), **given)


def jobs_of(path: Path, **given: Any) -> list[Job]:
    """The jobs of a manifest that has to be good."""
    chosen = options(**given)
    summary = check(str(path), chosen)
    made = list(jobs(str(path), chosen))
    assert len(made) == summary.jobs
    assert len({job.output for job in made}) == len(made)
    assert len({job.key for job in made}) == len(made)
    return made


def faults_of(path: Path, **given: Any) -> tuple[Fault, ...]:
    """The faults of a manifest that has to be refused."""
    with pytest.raises(ManifestError) as caught:
        check(str(path), options(**given))
    assert caught.value.exit_code == 2
    return caught.value.faults


def places(faults: tuple[Fault, ...]) -> list[tuple[int | None, str | None, str]]:
    return [(fault.row, fault.column, fault.kind) for fault in faults]


def warned(path: Path, **given: Any) -> dict[str, tuple[int, ...]]:
    """Kinds of warnings and their rows."""
    return {notice.kind: notice.rows for notice in check(str(path), options(**given)).warnings}


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
