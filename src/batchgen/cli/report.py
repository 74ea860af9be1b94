"""`batchgen report DIR`: what the night made, as a page to look at or data to go on with."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from batchgen.cli import streams
from batchgen.cli.places import RunPath
from batchgen.errors import EXIT_DONE
from batchgen.runfolder import RunFolder


@click.command(help="""Make a run's report: a page with its pictures, failures, tables and charts, or the same as text or data.

\b
batchgen report results/prompts-Qwen-Image
batchgen report results/prompts-Qwen-Image --format md
batchgen report results/prompts-Qwen-Image --format csv > jobs.csv
""")
@click.argument("folder", metavar="DIR", type=RunPath())
@click.option(
    "--format", "kind", type=click.Choice(["html", "md", "json", "csv"]), default="html", show_default=True,
    help="html writes DIR/report.html and a contact sheet; the others print: md a summary, json the sums, csv every job.",
)
def command(folder: Path, kind: str) -> int:
    run = RunFolder.open(folder)
    if kind == "html":
        _html(run)
        return EXIT_DONE
    from batchgen.report import textforms

    sys.stdout.writelines(textforms.lines(run, kind))
    return EXIT_DONE


def _html(run: RunFolder) -> None:
    from batchgen.report.html import write_contact_sheet, write_report

    made = [write_report(run, charts=True), write_contact_sheet(run)]
    with streams.kept_besides(sys.stdout, "where the page is", f"it is in {run.path}"):
        sys.stdout.writelines(f"{path}\n" for path in made if path is not None)
