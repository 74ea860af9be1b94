"""Where a setting's value comes from: command line > BATCHGEN_* > --config FILE > --preset NAME > ./batchgen.toml > built-in.

Click does the choosing: files become one `default_map`, environment variables are the options' own `envvar`. What is ours is reading
the files, refusing keys that no option has, and knowing afterwards which layer each value came from. Keys are the options' long names;
a table named after a command holds for that command alone and wins over the file's top level.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from batchgen.cli.helping import MAY_BE_BLANK
from batchgen.cli.numbers import Switch
from batchgen.errors import SettingsError, UsageError

LOCAL_FILE = "batchgen.toml"
PREFIX = "BATCHGEN"
# Variables under our prefix that are no option's: read by other parts of the program.
OTHER_VARIABLES = ("BATCHGEN_CACHE", "BATCHGEN_DEBUG", "BATCHGEN_CONFIG_DIR")
OTHER_PREFIXES = ("BATCHGEN_TEST_",)

_LAYERS = "batchgen.layers"
# Not passed to commands, yet settable: a file may name the preset, the environment the file.
_SETTINGS_OPTIONS = ("config_file", "preset")


@dataclass(frozen=True, slots=True)
class Layer:
    """One settings file. `kind`: "config", "preset" or "local"; `values` by parameter name, for the command at hand."""

    kind: str
    file: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting as it holds, and where it came from."""

    name: str  # the option's long name, without dashes
    value: Any
    source: str  # "command line", "environment", "config", "preset", "local" or "built-in"
    where: str | None  # the variable or file; None for the command line and built-in values


def option_name(option: click.Option) -> str:
    """The long name without dashes: `batch-size`. The positive one of an on/off pair."""
    longest = [text for text in option.opts if text.startswith("--")] or list(option.opts)
    return longest[-1].lstrip("-")


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Options that a settings file or the environment may set, by name with underscores."""
    found = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option) and (parameter.expose_value or parameter.name in _SETTINGS_OPTIONS):
            found[option_name(parameter).replace("-", "_")] = parameter
    return found


def preset_folder() -> Path:
    """configs/presets of the wheel or of the checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "configs" / "presets"
    return shipped if shipped.is_dir() else package.parents[1] / "configs" / "presets"


def preset_names() -> list[str]:
    return sorted(path.stem for path in preset_folder().glob("*.toml"))


def preset_file(name: str) -> Path:
    """The file of a preset. Raises UsageError naming the nearest one."""
    names = preset_names()
    if name not in names:
        raise UsageError(f"there is no preset {name!r}{nearest(name, names)}", option="--preset", hint=f"presets: {', '.join(names)}")
    return preset_folder() / f"{name}.toml"


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def read_layer(path: Path, kind: str, command: str, options: Mapping[str, click.Option], others: OtherOptions) -> Layer:
    """One file as the values it holds for `command`. Raises SettingsError for unreadable files, unknown keys and tables."""
    shown = str(path) if kind != "preset" else f"preset {path.stem}"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{shown}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{shown}: not a TOML file: byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and brackets nested too deeply
        raise SettingsError(f"{shown}: not a TOML file: {error}") from None
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    top = {key: value for key, value in data.items() if not isinstance(value, dict)}
    values: dict[str, Any] = {}
    for key, value in top.items():
        name = _once(key, top, shown)
        if name in options:
            values[options[name].name or name] = _plain(value, options[name], f"{shown}: {key}")
        elif name not in others.names():
            raise SettingsError(f"{shown}: unknown setting {key!r}{nearest(key, _spelled({*options, *others.names()}))}", hint=_HINT)
    for table, entries in tables.items():
        allowed = options if table == command else others.command(table)
        if allowed is None:
            known = sorted(others.commands())
            raise SettingsError(f"{shown}: unknown table [{table}]{nearest(table, known)}", hint=f"tables: {', '.join(known)}")
        for key, value in entries.items():
            name = _once(key, entries, f"{shown}: [{table}]")
            if name not in allowed:
                raise SettingsError(f"{shown}: unknown setting {key!r} in [{table}]{nearest(key, _spelled(allowed))}", hint=_HINT)
            if table == command:
                values[options[name].name or name] = _plain(value, options[name], f"{shown}: [{table}] {key}")
    return Layer(kind, shown, values)


_HINT = "a setting is an option's long name without the dashes; `batchgen run --help-all` lists them"


def _spelled(names: Iterable[str]) -> list[str]:
    return [name.replace("_", "-") for name in names]


def _once(key: str, table: Mapping[str, Any], where: str) -> str:
    """The key as options are known by. Raises SettingsError where the table says it twice, or names a settings file."""
    name = key.replace("-", "_")
    if twin := next((other for other in table if other != key and other.replace("-", "_") == name), None):
        raise SettingsError(f"{where}: {key!r} and {twin!r} are one setting; keep one of them")
    if name == "config":
        raise SettingsError(f"{where}: a settings file names no other", hint="Name it with --config or BATCHGEN_CONFIG.")
    return name


def _plain(value: Any, option: click.Option, where: str) -> Any:
    """A TOML value as click takes it: true or false for a switch, else text, which is checked as on the command line. Lists stay lists
    where an option repeats and become comma lists where it does not. Raises SettingsError for another kind of value."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise SettingsError(f"{where}: {_shown(value)} is neither true nor false; write one of them, without quotes")
        return value
    if isinstance(value, list):
        items = [_text(item, where) for item in value]
        return items if option.multiple or option.nargs != 1 else ",".join(items)
    if value == "" and option.name not in MAY_BE_BLANK:
        raise SettingsError(f"{where} is blank; say what it is, or leave the line out")
    return [_text(value, where)] if option.multiple else _text(value, where)


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool | list | dict) or "\0" in str(value):
        raise SettingsError(f"{where}: {_shown(value)} is no value of this setting; write a number or a text in quotes")
    return str(value)


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


class OtherOptions:
    """The options of the commands that are not running, loaded only when a key is not the running command's own."""

    def __init__(self, load: Callable[[], Mapping[str, click.Command]]) -> None:
        self._load = load
        self._found: dict[str, dict[str, click.Option]] | None = None

    def _all(self) -> dict[str, dict[str, click.Option]]:
        if self._found is None:
            self._found = {name: options_of(command) for name, command in self._load().items()}
        return self._found

    def commands(self) -> list[str]:
        return list(self._all())

    def command(self, name: str) -> Mapping[str, click.Option] | None:
        return self._all().get(name)

    def names(self) -> set[str]:
        return {name for options in self._all().values() for name in options}


def _apply(context: click.Context) -> None:
    """The layers known so far as click's default_map: the strongest file last."""
    merged: dict[str, Any] = {}
    layers: dict[str, Layer] = context.meta.get(_LAYERS, {})
    for kind in ("local", "preset", "config"):
        if kind in layers:
            merged.update(layers[kind].values)
    context.default_map = merged


def _layer_callback(kind: str, others: OtherOptions) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is None or context.resilient_parsing:
            return value
        path = preset_file(value) if kind == "preset" else Path(value)
        layer = read_layer(path, kind, context.command.name or "", options_of(context.command), others)
        context.meta.setdefault(_LAYERS, {})[kind] = layer
        _apply(context)
        return value

    return callback


def _local_callback(others: OtherOptions) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def callback(context: click.Context, parameter: click.Parameter, wanted: bool) -> bool:
        if context.resilient_parsing:
            return wanted
        check_environment(context, others)
        path = Path(LOCAL_FILE)
        if wanted and path.is_file():
            layer = read_layer(path, "local", context.command.name or "", options_of(context.command), others)
            context.meta.setdefault(_LAYERS, {})["local"] = layer
            _apply(context)
        return wanted

    return callback


def add_settings_options(command: click.Command, others: OtherOptions) -> None:
    """Gives a command --config and --preset and each of its options its environment variables. Done once, as it is loaded."""
    if any(parameter.name == "config_file" for parameter in command.params):
        return
    command.params += [
        # Declared first: without --config or --preset on the command line, click processes eager options in this order.
        click.Option(
            ["--local-settings/--no-local-settings"], is_eager=True, expose_value=False, default=True, callback=_local_callback(others),
            help=f"Read ./{LOCAL_FILE} (default).",
        ),
        # Eager, the file before the preset: a config file may name the preset, and both are known before any other option is looked up.
        click.Option(
            ["--config", "config_file"], metavar="FILE", is_eager=True, expose_value=False, callback=_layer_callback("config", others),
            help="Take settings from this TOML file.",
        ),
        click.Option(
            ["--preset"], metavar="NAME", is_eager=True, expose_value=False, callback=_layer_callback("preset", others),
            help=f"Take settings from a preset: {', '.join(preset_names())}.",
        ),
    ]
    for name, option in options_of(command).items():
        if option.is_flag:
            option.type = Switch()
        if option.envvar is None:
            option.envvar = [f"{PREFIX}_{(command.name or '').upper()}_{name.upper()}", f"{PREFIX}_{name.upper()}"]


def check_environment(context: click.Context, others: OtherOptions) -> None:
    """Refuses BATCHGEN_* variables that no option reads: a misspelt one would be ignored all night."""
    own = _variables(context.command.name or "", options_of(context.command))
    unknown = [name for name in os.environ if name.startswith(f"{PREFIX}_") and name not in own and name not in OTHER_VARIABLES]
    for name in sorted(unknown):
        if name.startswith(OTHER_PREFIXES):
            continue
        known = own.union(*(_variables(command, others.command(command) or {}) for command in others.commands()))
        if name not in known:
            raise SettingsError(f"environment: no option reads {name}{nearest(name, known)}", hint="unset it or correct its name")


def _variables(command: str, options: Mapping[str, click.Option]) -> set[str]:
    names = {f"{PREFIX}_{name.upper()}" for name in options}
    return names | {f"{PREFIX}_{command.upper()}_{name.upper()}" for name in options}


def where_from(context: click.Context, parameter: click.Parameter) -> tuple[str, str | None]:
    """(source, variable or file) of a parameter's value, as in `Resolved`."""
    source = context.get_parameter_source(parameter.name or "")
    if source is ParameterSource.ENVIRONMENT:
        names = [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar or ())
        return "environment", next((name for name in names if os.environ.get(name)), None)
    if source is ParameterSource.DEFAULT_MAP:
        layers: dict[str, Layer] = context.meta.get(_LAYERS, {})
        for kind in ("config", "preset", "local"):
            if kind in layers and parameter.name in layers[kind].values:
                return kind, layers[kind].file
    if source in (ParameterSource.COMMANDLINE, ParameterSource.PROMPT):
        return "command line", None
    return "built-in", None


def resolved_settings(context: click.Context) -> list[Resolved]:
    """Every option of the running command with its value and where it came from, sorted by name."""
    found = []
    for parameter in context.command.params:
        if not isinstance(parameter, click.Option) or parameter.name not in context.params:
            continue
        source, where = where_from(context, parameter)
        found.append(Resolved(option_name(parameter), context.params[parameter.name], source, where))
    return sorted(found, key=lambda setting: setting.name)
