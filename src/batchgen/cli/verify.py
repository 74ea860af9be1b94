"""`batchgen verify DIR`: every done job's file against the journal."""

from __future__ import annotations

import json
from pathlib import Path

import click

from batchgen.cli.places import RunPath, store_of
from batchgen.errors import EXIT_DONE, EXIT_SOME_FAILED
from batchgen.journal import Journal
from batchgen.remotecheck import verify_remote
from batchgen.report.safe import printable
from batchgen.runfolder import RunFolder
from batchgen.units import counted, size_text
from batchgen.verify import Tally, verify


@click.command(epilog="Exit codes: 0 all is as the journal says; 3 something is not.")
@click.argument("folder", metavar="DIR", type=RunPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: Path, as_json: bool) -> int:
    """Read every finished output of a run and compare it with the journal: missing, changed and unknown files. Changes nothing.
    Files of rows that the manifest no longer has are counted, and are no fault; so is what a run that goes on is writing.

    \b
    batchgen verify results/prompts-Qwen-Image
    """
    run, tally = RunFolder.open(folder), Tally()
    findings = []
    with Journal.read(run.journal) as journal:
        store = store_of(run)
        for finding in verify(run, journal, tally) if store is None else verify_remote(run, store, journal, tally):
            findings.append({"wrong": finding.wrong, "path": finding.path, "text": finding.text})
            if not as_json:
                click.echo(f"{finding.wrong}: {printable(finding.path)}: {finding.text}")
    if as_json:
        found = {
            "schema": 1, "checked": tally.checked, "bytes": tally.size_bytes, "vanished": tally.vanished, "unlisted": tally.unlisted,
            "others": tally.others, "going_on": tally.going_on, "in_hand": tally.in_hand, "findings": findings,
        }
        click.echo(json.dumps(found, ensure_ascii=False))
    else:
        if tally.going_on is not None:
            written = f"; {counted(tally.in_hand, 'file')} that it is writing or has just written, not compared" if tally.in_hand else ""
            click.echo(f"a run goes on here: {printable(tally.going_on)}{written}")
        if tally.vanished:
            click.echo(f"{counted(tally.vanished, 'file')} of rows no longer in the manifest, not compared")
        if tally.unlisted:
            files = counted(tally.unlisted, "file")
            click.echo(f"{files} of rows that --limit left out or that are no longer in the manifest, not compared")
        if tally.others:
            click.echo(f"{counted(tally.others, 'file')} that this shard does not know, as other shards' would be; not compared")
        said = "nothing is wrong" if not findings else counted(len(findings), "finding")
        click.echo(f"{counted(tally.checked, 'output')} checked, {size_text(tally.size_bytes)} as the journal says, {said}")
        if any(finding["wrong"] != "stranger" for finding in findings):
            click.echo("`batchgen run ... --verify` with the run's manifest and model renders again what is missing or damaged.")
    return EXIT_SOME_FAILED if findings else EXIT_DONE
