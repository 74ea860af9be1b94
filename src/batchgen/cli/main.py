"""The `batchgen` command: a table of lazily loaded commands, and the one place where an error becomes a message and an exit code.

A command is a module `batchgen.cli.<name>` with a click command named `command`. Loading this module, or showing its help, loads none
of them, and none of torch, diffusers, transformers and pandas.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import IO, Any, NoReturn

import click
from click.shell_completion import shell_complete

from batchgen import __version__
from batchgen.cli import completing, settings, streams
from batchgen.cli.helping import SectionedCommand
from batchgen.errors import EXIT_REFUSED, EXIT_STOPPED, BatchgenError, InterruptedRunError, UsageError
from batchgen.outputs.urls import without_secrets
from batchgen.report.safe import printable

# Name -> what --help says about it; the text stands here so that the list of commands needs none of them loaded.
COMMANDS = {
    "run": "Render a manifest; run again to resume.",
    "plan": "Decide where the model lives and explain it; renders nothing.",
    "check": "Check a manifest: counts, shapes, faults, names.",
    "merge": "Join the folders of a run's shards.",
    "status": "Show how far a run is, also while it goes on.",
    "report": "Make a page, a summary or data of a run.",
    "verify": "Compare a run's outputs with its journal.",
    "rerender": "Make pictures again from the settings inside them.",
    "doctor": "Say whether this machine is ready for the night.",
    "demo": "Render sixteen pictures with the built-in model.",
    "completion": "Print the completion script for bash, zsh or fish.",
}
EXIT_BROKEN_PIPE = 141
EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"there is no command {name!r}{settings.nearest(name, COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


def load_command(name: str) -> click.Command:
    """The click command of batchgen.cli.<name>, with --config, --preset, --debug and its environment variables."""
    own: click.Command = importlib.import_module(f"batchgen.cli.{name}").command
    command = SectionedCommand(
        name, callback=own.callback, params=[*own.params, _debug_option()], help=own.help, epilog=own.epilog, short_help=COMMANDS[name],
        context_settings=own.context_settings, no_args_is_help=own.no_args_is_help,
    )
    settings.add_settings_options(command, settings.OtherOptions(_load_all))
    if completing.completing():
        completing.attach(command)
    return command


def _load_all() -> dict[str, click.Command]:
    return {name: load_command(name) for name in COMMANDS}


def _note_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.find_root().meta["batchgen.debug"] = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, is_eager=True, callback=_note_debug, envvar="BATCHGEN_DEBUG",
        help="Show the traceback of an unexpected error.",
    )


group = LazyGroup(
    "batchgen",
    params=[_debug_option()],
    help="Renders a whole prompt list with a diffusion model, explains its memory plan, and never loses the night.\n\n"
    "\b\nbatchgen demo                                     a look, without a GPU\n"
    "batchgen plan --show-residency                    what would live where\n"
    "batchgen run prompts.csv --model Qwen/Qwen-Image  the night; again: resume",
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": settings.PREFIX, "max_content_width": 100},
)
group = click.version_option(__version__, "-V", "--version", prog_name="batchgen", message="%(prog)s %(version)s")(group)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: runs a command and exits with its code; an error becomes a message on stderr, never a traceback."""
    _insist_on_utf8()
    streams.mend()
    if completing.completing():
        sys.exit(shell_complete(group, {}, "batchgen", completing.VARIABLE, os.environ[completing.VARIABLE]))
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Runs the command line and gives its exit code. Messages go to stderr."""
    meta: dict[str, Any] = {}
    try:
        with group.make_context("batchgen", arguments) as context:
            meta = context.meta
            result = group.invoke(context)
            _flush()
            return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        return _say_usage(error)
    except BatchgenError as error:
        _say_error(error)
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _after_broken_pipe()
    except streams.StdoutLostError as error:
        streams.silence(sys.stdout)
        _say(f"error: standard output cannot be written: {error.strerror}")
        return EXIT_STOPPED
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            return _say_unexpected(error, arguments, debug=bool(meta.get("batchgen.debug")))
        _say(f"error: {_safe(_cut(str(error.filename)))}: {error.strerror}")  # wherever a path is looked at, it was given
        return EXIT_REFUSED
    except Exception as error:  # noqa: BLE001 - the last net: a message and a file instead of a traceback
        return _say_unexpected(error, arguments, debug=bool(meta.get("batchgen.debug")))


def _cut(text: str, width: int = 80) -> str:
    return text if len(text) <= width else f"{text[:width]}..."


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _after_broken_pipe() -> int:
    # The reader of our output has gone; Python would complain once more when it flushes at exit.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            streams.silence(stream)
    return EXIT_BROKEN_PIPE


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it, and the exit code says the same
        print(text, file=sys.stderr)


def _safe(text: str) -> str:
    return printable(without_secrets(text), keep="\n\t")


def _say_error(error: BatchgenError) -> None:
    option = f"{error.option}: " if isinstance(error, UsageError) and error.option and error.option not in error.message else ""
    head = "error: " if not isinstance(error, InterruptedRunError) else "" if error.message.startswith("stopped") else "stopped: "
    _say(f"{head}{_safe(option + error.message)}")
    if error.hint:
        _say(f"hint: {_safe(error.hint)}")


def _say_usage(error: click.ClickException) -> int:
    where = ""
    if isinstance(error, click.BadParameter) and error.ctx is not None and error.param is not None:
        _source, place = settings.where_from(error.ctx, error.param)
        where = f" (from {place})" if place else ""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # its message is the help itself
        _say(error.format_message())
        return EXIT_REFUSED
    _say(f"error: {_safe(error.format_message())}{where}")
    if context is not None:
        _say(f"hint: `{context.command_path} --help` shows what it takes")
    return EXIT_REFUSED


def _say_unexpected(error: Exception, arguments: list[str], *, debug: bool) -> int:
    # Loaded here: an error that nobody foresaw may cost a moment more, every other start should not.
    import tempfile
    import traceback

    trace = without_secrets("".join(traceback.format_exception(error)))
    if debug:
        _say(trace)
        return EXIT_STOPPED
    summary = f"{type(error).__name__}: {_safe(str(error))}".strip().splitlines()[0]
    try:
        with tempfile.NamedTemporaryFile("w", prefix="batchgen-crash-", suffix=".txt", delete=False, encoding="utf-8") as file:
            _write_crash(file, trace, arguments)
        _say(f"error: unexpected {summary}; details: {file.name}")
    except OSError:
        _say(f"error: unexpected {summary}; run again with --debug for the details")
    return EXIT_STOPPED


def _write_crash(file: IO[str], trace: str, arguments: list[str]) -> None:
    said = [without_secrets(argument) for argument in arguments]
    file.write(f"batchgen {__version__}, Python {sys.version}, {sys.platform}\narguments: {said}\n\n{trace}")


def _insist_on_utf8() -> None:
    """Starts again in Python's UTF-8 mode where the locale has another encoding, so that paths and files are UTF-8 everywhere."""
    if sys.getfilesystemencoding().lower().replace("-", "") != "utf8" and os.environ.get("PYTHONUTF8") != "1" and os.name == "posix":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same program with the same arguments
