"""`batchgen status DIR`: how far a run is, also while it goes on."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.live import Live

from batchgen.cli.numbers import FiniteRange
from batchgen.cli.places import RunPath
from batchgen.errors import EXIT_DONE
from batchgen.report.console import console
from batchgen.report.status import collect, render
from batchgen.runfolder import RunFolder

_TEXT_WIDTH = 120  # without a terminal


@click.command(help="""Show how far a run is: counts, rate, time left, failures by reason, workers. Reads the folder only.

\b
batchgen status results/prompts-Qwen-Image
batchgen status results/prompts-Qwen-Image --watch
""")
@click.argument("folder", metavar="DIR", type=RunPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (with --watch: one a line each time).")
@click.option("--watch", is_flag=True, help="Look again until the run has ended.")
@click.option(
    "--interval", type=FiniteRange(min=0.1), default=2.0, show_default=True, metavar="SECONDS", help="Between looks of --watch."
)
def command(folder: Path, as_json: bool, watch: bool, interval: float) -> int:
    run = RunFolder.open(folder)
    status = collect(run)
    if not watch:
        _print(status, as_json, one_line=False)
    elif as_json or not sys.stdout.isatty():
        _print(status, as_json, one_line=True)
        while status["state"] == "running":
            time.sleep(interval)
            status = collect(run)
            _print(status, as_json, one_line=True)
    else:
        with Live(render(status), console=console(sys.stdout, elsewhere=_TEXT_WIDTH), auto_refresh=False) as live:
            while status["state"] == "running":
                time.sleep(interval)
                status = collect(run)
                live.update(render(status), refresh=True)
    return EXIT_DONE


def _print(status: dict[str, Any], as_json: bool, *, one_line: bool) -> None:
    if as_json:
        click.echo(json.dumps(status, ensure_ascii=False, indent=None if one_line else 2))
    else:
        console(sys.stdout, elsewhere=_TEXT_WIDTH).print(render(status))
