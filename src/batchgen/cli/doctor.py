"""`batchgen doctor`: is this machine ready for the night?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen import doctor
from batchgen.cli.model_options import model_options
from batchgen.errors import EXIT_DONE, EXIT_STOPPED, BatchgenError
from batchgen.inventory.model import ModelOptions
from batchgen.report.safe import printable

if TYPE_CHECKING:
    from batchgen.report.sheet import Sheet

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failure": ("FAILURE", "bold red")}


@click.command(help="""Check this machine: libraries, devices, memory, disk, hub, encoder, and a model if one is named.

\b
batchgen doctor
batchgen doctor --model Qwen/Qwen-Image -o /data/night
""", epilog="Exit codes: 0 ready, maybe with warnings; 1 something would stop a run.")
@model_options
@click.option("-o", "--output", metavar="DIR", type=click.Path(path_type=Path), default=Path("results"), help="Where outputs would go.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, model_options: ModelOptions, output: Path, as_json: bool) -> int:
    checks = list(_checks(model, model_options, output))
    verdict = doctor.worst(checks)
    if as_json:
        lines = [{"name": check.name, "status": check.status, "text": check.text, "fix": check.fix} for check in checks]
        click.echo(json.dumps({"schema": 1, "status": verdict, "checks": lines}, ensure_ascii=False))
    else:
        _print(checks)
    return EXIT_STOPPED if verdict == "failure" else EXIT_DONE


def _checks(model: str | None, options: ModelOptions, output: Path) -> Iterator[doctor.Check]:
    import huggingface_hub
    from huggingface_hub import constants

    from batchgen.inventory.device import probe

    yield doctor.python_check()
    yield from doctor.library_checks()
    vision = doctor.torchvision_check()
    if vision is not None:
        yield vision
    found: list[Any] = []

    def probed() -> Any:
        found.append(probe(None))
        return found[0]

    yield from doctor.device_checks(probed)
    driver = doctor.driver_check(found[0][0]) if found else None
    if driver is not None:
        yield driver
    on_torch = doctor.torch_device_check(found[0][0]) if found else None
    if on_torch is not None:
        yield on_torch
    yield doctor.disk_check("output disk", output)
    yield doctor.disk_check("model cache", Path(options.cache_dir or constants.HF_HUB_CACHE))
    yield doctor.write_check(output)
    yield from doctor.hub_checks(offline=constants.HF_HUB_OFFLINE, token=huggingface_hub.get_token() is not None, reach=_reach_hub)
    yield doctor.video_check()
    if model is not None:
        yield _model_check(model, options, found[0][0] if found else "cpu")


def _reach_hub() -> str | None:
    """None where the hub answers within a few seconds, else the kind of failure; never a URL with credentials in it."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from huggingface_hub import constants

    if not constants.ENDPOINT.startswith(("https://", "http://")):
        return "HF_ENDPOINT is no web address"
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=5.0):  # noqa: S310 - the scheme was looked at
            return None
    except HTTPError as error:
        return f"HTTP status {error.code}"
    except URLError as error:
        return str(getattr(error.reason, "strerror", None) or type(error.reason).__name__)
    except OSError as error:
        return type(error).__name__


def _model_check(model: str, options: ModelOptions, platform: Any) -> doctor.Check:
    """What the inventory says of the model; nothing is downloaded but its small files."""
    from dataclasses import replace

    from batchgen.inventory.model import resolve
    from batchgen.units import counted, size_text

    try:
        facts = resolve(model, replace(options, download=False), platform=platform)
    except BatchgenError as error:
        return doctor.Check("model", "failure", error.message, error.hint or "")
    total = sum(part.bytes_as_loaded or 0 for part in facts.components)
    count = f"{counted(len(facts.components), 'component')}, {size_text(total)} as loaded"
    text = f"{facts.source} ({facts.pipeline_class}), {count}, {facts.revision[:12]}"
    return doctor.Check("model", "ok", "; ".join([text, *facts.notes]))


def checks_table(checks: Sequence[doctor.Check]) -> Sheet:
    """One line a check, what to do about it behind."""
    from rich.text import Text

    from batchgen.report.sheet import Column, Sheet

    table = Sheet("", (Column("", keep=0), Column("check", keep=1), Column("found", "text", label="")), header=False)
    for check in checks:
        word, style = _MARKS[check.status]
        found = Text(printable(check.text))
        if check.fix:
            found.append(f"; {printable(check.fix)}", style="dim")
        table.add(Text(word, style=style), printable(check.name), found)
    return table


def _print(checks: Sequence[doctor.Check]) -> None:
    from batchgen.report.console import console

    console(sys.stdout).print(checks_table(checks))
