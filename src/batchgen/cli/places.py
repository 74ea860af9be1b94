"""Where a run's folder is: a path, or for outputs at a URL the local state folder that belongs to it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchgen.cli.run_options import RunOptions
from batchgen.errors import RefusedError, UsageError
from batchgen.outputs.urls import Location, check_slashes, is_url, state_folder
from batchgen.runfolder import RunFolder

if TYPE_CHECKING:
    from batchgen.lease import Lease
    from batchgen.outputs.store import Store

_SHOWN = 10


class RunPath(click.ParamType[Path]):
    """A run's folder, or the URL that its outputs went to."""

    name = "folder"

    def convert(self, value: str | Path, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        text = str(value)
        if not is_url(text):
            check_slashes(text, option=None)
            return check_folder(Path(text), option=None)
        location = Location.parse(text)
        folder = state_folder(location, os.environ)
        if not _begun(folder):
            shards = sorted(path for path in folder.parent.glob(f"{folder.name}-*-of-*") if _begun(path))
            if len(shards) == 1:
                return shards[0]
            if shards:
                raise RefusedError(
                    f"{location.shown} holds {len(shards)} shards that were run here, each with a state of its own:\n"
                    + "\n".join(f"  {path}" for path in shards[:_SHOWN]) + ("\n  ..." if len(shards) > _SHOWN else ""),
                    hint="Name one of these folders.",
                )
            raise RefusedError(
                f"no state of a run into {location.shown} is here: {folder} has no run.json",
                hint="If the run was begun with --state, name that folder instead. The state lies on the machine that ran it.",
            )
        return folder


def check_folder(path: Path, option: str | None = "--output") -> Path:
    """The path. Raises UsageError where no folder can ever be: below a file, behind a link to nothing, under too long a name."""
    try:
        path.stat()
        return path
    except FileNotFoundError:
        if not path.is_symlink():
            return path
        why = "it is a link to nothing"
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):  # it may well be there: what comes of it is said where it is used
            return path
        why = error.strerror or str(error)
    raise UsageError(f"{path} cannot be a folder: {why}", option=option, hint="Name another one.")


def _begun(folder: Path) -> bool:
    return RunFolder(folder).run_json.exists() or RunFolder(folder).journal.exists()


def run_place(run: RunOptions, default: Path) -> tuple[Path, Store | None]:
    """The run folder and, where outputs go to a URL, the store that takes them. To be held by `held` before it is looked into.

    Raises UsageError, RefusedError for a place that cannot be written to, StoreError.
    """
    if run.output is not None:
        check_slashes(run.output)
    if run.output is None or not is_url(run.output):
        if run.state is not None:
            raise UsageError(
                "--state goes with outputs at a URL; a run on a disk keeps its journal in its own folder", option="--state",
                hint="Leave it out, or name a URL with -o, like s3://bucket/run.",
            )
        if run.take_over:
            raise UsageError(
                "--take-over goes with outputs at a URL; a run on a disk takes a dead run's folder over by itself", option="--take-over",
                hint="Leave it out.",
            )
        return check_folder(Path(run.output) if run.output is not None else default), None
    from batchgen.checkpoints import records_below
    from batchgen.outputs.store import Store

    location = Location.parse(run.output)
    store = Store(location)
    store.probe()
    folder = _state(run, location)
    number = 1
    while run.new and (folder.exists() or store.stat(records_below(run.shard) + "run.json") is not None):
        number += 1
        location = Location.parse(f"{run.output.rstrip('/')}-{number}")
        store, folder = Store(location), _state(run, location, number)
    return folder, store


@contextmanager
def held(folder: Path, store: Store, run: RunOptions, say: Callable[[str], None]) -> Iterator[Lease]:
    """Holds a run's state folder against this machine and its address against all others; takes up what another machine left there.

    Raises RunLockedError, LeaseHeldError, StoreError, DiskError.
    """
    from batchgen.checkpoints import records_below, take_up
    from batchgen.lease import Lease

    new = not folder.exists()
    try:
        with RunFolder(folder).lock(), Lease(store.location, run.shard).acquire(take_over=run.take_over, say=say) as lease:
            take_up(RunFolder(folder), store, records_below(run.shard))
            yield lease
    finally:
        if new:
            with suppress(OSError):  # only an empty one goes: of a run that was refused
                folder.rmdir()


def _state(run: RunOptions, location: Location, number: int = 1) -> Path:
    if run.state is None:
        return state_folder(location, os.environ, None if run.shard is None else run.shard.label)
    given = Path(run.state)
    return (given if number == 1 else given.with_name(f"{given.name}-{number}")).absolute()


def store_of(folder: RunFolder) -> Store | None:
    """The store that an existing run's outputs are in; None where they are in the folder. Credentials as the environment has them."""
    remote = (folder.read_run() or {}).get("remote")
    if not isinstance(remote, str):
        return None
    from batchgen.outputs.store import Store

    return Store(Location.parse(remote))
