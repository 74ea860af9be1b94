"""docs/cli.md, generated from the commands themselves: `python -m batchgen.cli.reference > docs/cli.md`. A test holds the file to it."""

from __future__ import annotations

import re
import sys

import click

from batchgen.cli.helping import SECTIONS, long_name
from batchgen.cli.main import COMMANDS, load_command

_HEAD = """# Commands

Generated from the program (`python -m batchgen.cli.reference > docs/cli.md`). Every option can also be set by the environment variable
named with it, by `--config FILE`, `--preset NAME` or `./batchgen.toml`: see [settings](settings.md).

Exit codes: 0 all done · 1 the run could not go on · 2 usage, manifest, model or plan refused · 3 finished, some jobs failed or were
filtered · 130, 143, 129 stopped by SIGINT, SIGTERM, SIGHUP (the same command resumes) · 141 the reader
of its output has gone, as in `... | head` (a run's outputs are made all the same).
"""


def reference() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    for name, summary in COMMANDS.items():
        parts.append(_command(name, summary, load_command(name)))
    return "\n".join(parts)


def _command(name: str, summary: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"batchgen {name}")
    lines = [f"## batchgen {name}", "", summary, "", "```", command.get_usage(context).removeprefix("Usage: "), "```", ""]
    options = {long_name(part): part for part in command.params if isinstance(part, click.Option) and not part.hidden}
    for title, rows in _sections(name, options):
        lines += [f"**{title}**", "", "| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _sections(command: str, options: dict[str, click.Option]) -> list[tuple[str, list[str]]]:
    left = dict(options)
    found = []
    for title, names in SECTIONS.items():
        rows = [_row(command, left.pop(name)) for name in names if name in left]
        if rows:
            found.append((title, rows))
    if left:
        found.append(("Other", [_row(command, option) for option in left.values()]))
    return found


def _row(command: str, option: click.Option) -> str:
    context = click.Context(click.Command(command), info_name=command)
    record = option.get_help_record(context)
    written, meaning = record if record is not None else ("/".join(option.opts), "")
    names = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    variable = f" · `{names[-1]}`" if names else ""  # the last is the one for every command
    return f"| `{_cell(written)}` | {_cell(meaning)}{variable} |"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


if __name__ == "__main__":
    sys.stdout.write(reference())
