"""Where a run's folder is: a path, or for outputs at a URL the local state folder that belongs to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchgen.cli.run_options import RunOptions
from batchgen.errors import RefusedError, UsageError
from batchgen.outputs.urls import Location, check_slashes, is_url, state_folder
from batchgen.runfolder import RunFolder

if TYPE_CHECKING:
    from batchgen.outputs.store import Store


class RunPath(click.ParamType[Path]):
    """A run's folder, or the URL that its outputs went to."""

    name = "folder"

    def convert(self, value: str | Path, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        text = str(value)
        if not is_url(text):
            check_slashes(text, option=None)
            return Path(text)
        location = Location.parse(text)
        folder = state_folder(location, os.environ)
        if not RunFolder(folder).run_json.exists() and not RunFolder(folder).journal.exists():
            raise RefusedError(
                f"no state of a run into {location.shown} is here: {folder} has no run.json",
                hint="If the run was begun with --state, name that folder instead. The state lies on the machine that ran it.",
            )
        return folder


def run_place(run: RunOptions, default: Path) -> tuple[Path, Store | None]:
    """The run folder and, where outputs go to a URL, the store that takes them, with what another machine left there taken up.

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
        return Path(run.output) if run.output is not None else default, None
    from batchgen.checkpoints import take_up
    from batchgen.outputs.store import Store

    location = Location.parse(run.output)
    store = Store(location)
    store.probe()
    folder = _state(run, location)
    number = 1
    while run.new and (folder.exists() or store.stat("run.json") is not None):
        number += 1
        location = Location.parse(f"{run.output.rstrip('/')}-{number}")
        store, folder = Store(location), _state(run, location, number)
    take_up(RunFolder(folder), store)
    return folder, store


def _state(run: RunOptions, location: Location, number: int = 1) -> Path:
    if run.state is None:
        return state_folder(location, os.environ)
    given = Path(run.state)
    return (given if number == 1 else given.with_name(f"{given.name}-{number}")).absolute()


def store_of(folder: RunFolder) -> Store | None:
    """The store that an existing run's outputs are in; None where they are in the folder. Credentials as the environment has them."""
    remote = (folder.read_run() or {}).get("remote")
    if not isinstance(remote, str):
        return None
    from batchgen.outputs.store import Store

    return Store(Location.parse(remote))
