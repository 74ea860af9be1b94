"""`batchgen demo`: the whole way once, with the built-in model, no network and no GPU needed."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click

from batchgen import builtin
from batchgen.cli import streams
from batchgen.cli.run_options import RunOptions
from batchgen.cli.settings import resolved_settings
from batchgen.runfolder import RunFolder

FOLDER = "results/demo-builtin"
FAILURE_FOLDER = "results/demo-with-failure-builtin"


@click.command()
@click.option("-o", "--output", metavar="DIR", help=f"Run folder.  [default: {FOLDER}]")
@click.option(
    "--with-failure", is_flag=True,
    help=f"One row more, which fails on purpose: what a failed job looks like. Exit code 3.  [folder: {FAILURE_FOLDER}]",
)
@click.option("--new", is_flag=True, help="Render once more, beside an earlier demo.")
@click.option("--device", metavar="NAME", help="cuda:0, mps or cpu; default: what is there.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors and the tables.")
@click.pass_context
def command(context: click.Context, output: str | None, with_failure: bool, new: bool, device: str | None, quiet: bool) -> int:
    """Render sixteen pictures with the small built-in model, and show what a run leaves behind.

    \b
    batchgen demo
    batchgen demo -o /tmp/demo
    batchgen demo --with-failure
    """
    from batchgen.cli.rendering import render
    from batchgen.cli.request import RenderRequest
    from batchgen.inventory.model import BUILTIN, ModelOptions
    from batchgen.manifest.options import ManifestOptions
    from batchgen.plan.records import Overrides
    from batchgen.report.html import write_contact_sheet

    output = output if output is not None else FAILURE_FOLDER if with_failure else FOLDER
    run = RunOptions(output=output, new=new, devices=(device,) if device else (), quiet=quiet)
    manifest = str(builtin.demo_manifest(with_failure=with_failure))
    request = RenderRequest(
        manifest, BUILTIN, ModelOptions(), Overrides(), ManifestOptions(), run, tuple(resolved_settings(context)),
    )
    outcome = render(request)
    sheet = write_contact_sheet(outcome.folder)
    _say_what_next(outcome.folder, sheet, failed=outcome.result.counts["failed"])
    return outcome.exit_code


def _say_what_next(folder: RunFolder, sheet: Path | None, *, failed: int) -> None:
    from batchgen.report.console import console
    from batchgen.report.tables import TEXT_WIDTH

    lines = [f"contact sheet: {sheet}" if sheet else "", "Next:"]
    steps = [
        ("batchgen plan --show-residency", "where Qwen-Image would live on this machine, and why"),
        (f"batchgen status {_shown(folder.path)}", "what failed, and why" if failed else "what the run folder knows"),
        ("batchgen run prompts.csv --model Qwen/Qwen-Image", "your own list; run it again to resume"),
    ]
    lines += next_lines(steps, console(sys.stdout, elsewhere=TEXT_WIDTH).width)
    with streams.kept_besides(sys.stdout, "what to do next", f"the pictures are in {folder.path}"):
        sys.stdout.write("\n".join(line for line in lines if line) + "\n")


def next_lines(steps: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Commands with what they are for: beside them, or wrapped under them where `width` is too small. A command is never broken."""
    longest = max(len(step) for step, _ in steps)
    if max(len(text) for _, text in steps) + longest + 4 <= width:
        return [f"  {step:<{longest}}  {text}" for step, text in steps]
    inside = " " * 6
    return [
        line for step, text in steps
        for line in (f"  {step}", *textwrap.wrap(text, max(width, len(inside) + 20), initial_indent=inside, subsequent_indent=inside))
    ]


def _shown(path: Path) -> str:
    """The path as short as it can be typed here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
