"""How batchgen is tested: plain `nox` runs tests, lint and types, each in its own environment with the pinned versions."""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "virtualenv"

PROJECT = nox.project.load_toml("pyproject.toml")
# Two threads beside another busy process can be many times slower than one, and results must not depend on the count.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def install(session: nox.Session, *, groups: tuple[str, ...], extras: str = "lora,parquet,ray,remote,video") -> None:
    """The package with `extras` and the dependency groups, at the versions of constraints.txt."""
    wanted = [requirement for group in groups for requirement in nox.project.dependency_groups(PROJECT, group)]
    session.install("-c", "constraints.txt", f".[{extras}]", *wanted)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything but the tests that need a GPU, in two processes of one thread each. Arguments after -- go to pytest instead."""
    install(session, groups=("test",))
    # In the order of the folders: the long files, which hold few tests, come first, and no process is left with them at the end.
    arguments = session.posargs or ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    session.run("python", "-m", "pytest", *arguments, env=ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff over the whole repository."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, over the package."""
    install(session, groups=("lint",))
    session.run("mypy")


@nox.session
def bench(session: nox.Session) -> None:
    """Measures what the documents claim and writes it to results/benchmarks/. Arguments after -- name single benchmarks."""
    install(session, groups=("test",))
    for path in sorted(Path("tools/bench").glob("[!_]*.py")):
        if not session.posargs or path.stem in session.posargs:
            session.run("python", str(path), env=ENVIRONMENT)


@nox.session
def long(session: nox.Session) -> None:
    """Everything, with the tests that repeat a quicker one over more families, ranks and attempts."""
    install(session, groups=("test",), extras="lora,parquet,ray,remote,video")
    session.run("python", "-m", "pytest", "--run-long", "-n", "2", "--dist", "loadfile", *session.posargs, env=ENVIRONMENT)


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device."""
    install(session, groups=("test",))
    session.run("python", "-m", "pytest", "tests/gpu", "--run-gpu", *session.posargs)
