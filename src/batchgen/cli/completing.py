"""What a shell completes for batchgen: names of profiles, presets, cards and devices, run folders, models. Loaded only while completing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
# Set by the script that `batchgen completion` prints.
VARIABLE = "_BATCHGEN_COMPLETE"


def attach(command: click.Command) -> None:
    """Gives the command's parameters their completers, by what they are called."""
    for parameter in command.params:
        completer = _COMPLETERS.get(parameter.name or "")
        if parameter.name in ("folder", "folders") and isinstance(parameter, click.Argument):
            completer = _run_folders
        if completer is not None:
            # click's documented hook of a parameter made without one
            parameter._custom_shell_complete = completer


def completing() -> bool:
    """Whether this process was started by a shell to complete a line."""
    return VARIABLE in os.environ


def _matching(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    start = incomplete.casefold()
    return [CompletionItem(name) for name in sorted(names) if name.casefold().startswith(start)]


def _profiles(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from batchgen.inventory.profiles import config_dir

    return _matching((path.stem for path in (config_dir() / "models").glob("*.toml")), incomplete)


def _presets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from batchgen.cli.settings import preset_names

    return _matching(preset_names(), incomplete)


def _cards(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from batchgen.inventory.catalogue import catalogue

    return _matching((card.name for card in catalogue()), incomplete)


def _devices(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from batchgen.errors import BatchgenError
    from batchgen.inventory.device import probe

    before, comma, last = incomplete.rpartition(",")
    try:
        _, devices = probe(None)
    except BatchgenError:
        return []
    names = {*(device.torch_name for device in devices), "cpu"}
    return [CompletionItem(before + comma + item.value) for item in _matching(names, last)]


def _models(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`builtin`, the hub ids that profiles know, and folders."""
    import tomllib

    from batchgen.inventory.profiles import config_dir

    found = {"builtin"}
    for path in (config_dir() / "models").glob("*.toml"):
        found.update(tomllib.loads(path.read_text("utf-8")).get("models", ()))
    here = Path(incomplete).parent if "/" in incomplete else Path()
    folders = {str(path) for path in here.glob("*/model_index.json")} if here.is_dir() else set()
    return _matching({*found, *(str(Path(path).parent) for path in folders)}, incomplete)


def _run_folders(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders with a journal: in ./results, and where the line points so far."""
    places = {Path("results"), Path(incomplete).parent if incomplete else Path()}
    found = [str(path.parent) for place in places if place.is_dir() for path in place.glob("*/journal.sqlite")]
    return _matching(found, incomplete) or [CompletionItem(incomplete, type="dir")]


_COMPLETERS: dict[str, Completer] = {
    "profile": _profiles, "preset": _presets, "gpu": _cards, "gpus": _cards, "device": _devices, "devices": _devices, "model": _models,
}
