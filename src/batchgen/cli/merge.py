"""`batchgen merge DIR... -o DIR`: the shards of one run as one run folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from batchgen.cli import streams
from batchgen.cli.finishing import write_jobs_table
from batchgen.cli.places import RunPath, check_folder, store_of
from batchgen.errors import EXIT_DONE, EXIT_SOME_FAILED, DiskError, UsageError
from batchgen.journal import Journal
from batchgen.merging import Part, check_target, merge, not_there, read_parts
from batchgen.outputs.files import atomic_write
from batchgen.outputs.urls import check_slashes, is_url, without_secrets
from batchgen.report.html import write_report
from batchgen.report.measured import add_up
from batchgen.report.safe import printable
from batchgen.runfolder import RunFolder
from batchgen.shards import Shard
from batchgen.units import counted

_SHOWN = 10
_OWN = "runs of the joined folder\n\n"


@click.command(epilog="Exit codes: 0 joined, all jobs done; 2 refused; 3 joined, jobs failed or are left, or rows or shards are missing.")
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=RunPath())
@click.option("-o", "--output", required=True, metavar="DIR", help="The whole run's folder.")
@click.option("--copy", is_flag=True, help="Copy outputs instead of linking them.")
@click.option("--partial", is_flag=True, help="Join what there is though shards are missing; merge again when they are there.")
def command(folders: tuple[Path, ...], output: str, copy: bool, partial: bool) -> int:
    """Join the folders of runs with --shard 1/N ... N/N into one run folder: journal, outputs, tables, report.

    \b
    batchgen merge out/1 out/2 out/3 -o out/all

    Outputs are hard links where the file system has them. Merging again takes over what shards have done since; a merge that was
    killed is finished by the same command. The new folder can be run like any other, without --shard: that renders what is left.
    """
    if is_url(output):
        message = f"{without_secrets(output)}: shards are joined into a folder on a disk"
        raise UsageError(message, option="--output", hint="Name a folder with -o.")
    check_slashes(output)
    check_folder(Path(output))
    parts = read_parts(folders, partial=partial)
    target = RunFolder(Path(output).absolute())
    check_target(target, parts)
    with target.lock():
        found = merge(target, parts, copy=copy, say=lambda line: click.echo(printable(line), err=True), store_of=store_of)
        with Journal.read(target.journal) as journal:
            write_jobs_table(target, journal)
            counts, skipped = journal.counts(), len(journal.skipped())
        _join_tables(target, parts)
        add_up(target, {str(part.shard): part.folder for part in parts})
        report = write_report(target)
    missing = not_there(target, parts)
    for line in (*found.lines, *missing_lines(missing)):
        click.echo(printable(line), err=True)
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no jobs"
    left_out = f"; {counted(skipped, 'invalid row')} skipped" if skipped else ""
    with streams.kept_besides(sys.stdout, "what was joined", f"it is in {target.path}"):
        sys.stdout.write(f"{target.path}: {said}{left_out}\n{report}\n")
    return EXIT_SOME_FAILED if missing or skipped or any(counts[state] for state in ("pending", "failed", "filtered")) else EXIT_DONE


def missing_lines(missing: Sequence[Shard]) -> list[str]:
    """For people: one line for each of the first shards that are not there."""
    said = [f"shard {shard} is not there: its jobs are missing" for shard in missing[:_SHOWN]]
    return [*said, f"... and {len(missing) - _SHOWN} more shards"] if len(missing) > _SHOWN else said


def _join_tables(target: RunFolder, parts: Sequence[Part]) -> None:
    """The shards' printed tables one after the other, then those of the target's own last run; what all shards say alike is said once.

    A text joined before begins with "shard", which no run's does; it is made anew, and the target's own part taken over.
    """
    for name in ("residency.txt", "timings.txt"):
        texts = [(part, text) for part in parts if (text := _text(part.folder.tables / name)) is not None]
        if not texts:
            continue
        if len({text for _, text in texts}) == 1:
            joined = f"shards {', '.join(str(part.shard) for part, _ in texts)}\n\n{texts[0][1]}"
        else:
            joined = "\n".join(f"shard {part.shard} ({part.folder.path.name})\n\n{text}" for part, text in texts)
        before = _text(target.tables / name) or ""
        own = before.partition(f"\n{_OWN}")[2] if before.startswith("shard") else before
        if own:
            joined += f"\n{_OWN}{own}"
        atomic_write(target.tables / name, joined.encode("utf-8"), overwrite=True)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DiskError(f"{path} cannot be read: {error.strerror or error}") from error
