"""Help that fits a screen: what a command does, examples, the options people use first; --help-all shows all of them, by topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from batchgen.errors import UsageError

# What `--help` of a command with many options shows: groups of (option, what it takes, a line on it). Everything else is for --help-all.
SHORT: dict[str, dict[str, tuple[tuple[str, str, str], ...]]] = {
    "run": {
        "What": (
            ("model", "ID_OR_FOLDER", "hub id, folder in diffusers' layout, or builtin"),
            ("output", "DIR", "run folder; default results/<manifest>-<model>"),
            ("new", "", "start beside a folder that holds another run"),
            ("limit", "N", "only the first N rows"),
            ("skip-invalid", "", "leave rows with faults out"),
        ),
        "Pictures whose rows do not say": (
            ("size", "WxH", "e.g. 1024x1024"),
            ("steps", "N", "denoising steps"),
            ("guidance", "X", "guidance scale"),
            ("num-images", "N", "pictures a row"),
        ),
        "Memory and speed": (
            ("device", "LIST", "e.g. cuda:0,cuda:1 or cpu; default: all"),
            ("performance-mode", "MODE", "auto, manual, speed or memory"),
            ("component-residency", "LIST", "e.g. vae=resident"),
            ("batch-size", "N|auto", "1 repeats pictures bit for bit"),
        ),
        "The night": (
            ("stop-at", "HH:MM", "end in good order at this time"),
            ("retry-failed", "", "try failed jobs again"),
            ("preset", "NAME", "draft or overnight"),
        ),
    },
    "plan": {
        "What": (
            ("model", "ID_OR_FOLDER", "default Qwen/Qwen-Image"),
            ("size", "WxH", "size to plan for, e.g. 1024x1024"),
            ("jobs", "N", "how many; default: the manifest's, else 100"),
        ),
        "Where": (
            ("gpu", "NAME[xN]", 'a card of the catalogue, e.g. "RTX 4090x2"'),
            ("device-memory", "TOTAL[:FREE]", "a card by its GiB, e.g. 24:22.5"),
            ("compare", "NAME,...", "several cards side by side"),
            ("device", "LIST", "devices at hand"),
        ),
        "How": (
            ("performance-mode", "MODE", "auto, manual, speed or memory"),
            ("component-residency", "LIST", "e.g. transformer=layerwise-offload"),
            ("batch-size", "N|auto", "jobs in one batch"),
            ("policy-only", "", "rules only: nothing is rehearsed"),
        ),
        "What is said": (
            ("show-residency", "", "where each component lives, who decided, why"),
            ("explain", "", "the whole trail of decisions"),
            ("json", "", "one JSON object"),
        ),
    },
    "check": {
        "Options": (
            ("model", "ID_OR_FOLDER", "check sizes and prompt lengths against it"),
            ("format", "KIND", "csv, tsv, jsonl, json, txt or parquet"),
            ("prompt-column", "NAME", "the column of the prompts"),
            ("name", "TEMPLATE", "how outputs are named"),
            ("size", "WxH", "size of rows that name none"),
            ("snap", "", "take the nearest size that the model can make"),
            ("skip-invalid", "", "leave rows with faults out"),
            ("on-truncate", "warn|error", "prompts longer than the model reads"),
            ("faults-file", "FILE", "write every fault, one a line"),
            ("json", "", "one JSON object"),
        ),
    },
}
# Options that every command has; short help leaves them to --help-all.
COMMON = frozenset({
    "debug", "local-settings", "config", "preset", "revision", "variant", "dtype", "trust-remote-code", "allow-pickle", "cache-dir",
    "help-all",
})  # fmt: skip

MAY_BE_BLANK = frozenset({"negative_prompt"})  # parameters for which no text is a text, too

# Sections of --help-all; an option that none names stands under "Other".
SECTIONS = {
    "Model": (
        "model", "revision", "variant", "dtype", "trust-remote-code", "allow-pickle", "cache-dir", "profile", "profile-file", "model-facts",
    ),
    "Devices": (
        "device", "devices", "device-memory", "gpu", "compare", "platform", "workers", "engine", "ray-address", "threads",
        "reserve-vram", "host-memory",
    ),
    "Placement": (
        "performance-mode", "component-residency", "cpu-offload-components", "layerwise-offload-components", "dit-cpu-offload",
        "text-encoder-cpu-offload", "image-encoder-cpu-offload", "vae-cpu-offload", "dit-layerwise-offload", "fsdp", "fsdp-group-size",
        "cfg-parallel",
        "keep-resident-min-available-gb", "batch-size", "vae-tiling", "attention-backend", "compile", "force",
    ),
    "Manifest": (
        "format", "encoding", "delimiter", "prompt-column", "carry", "limit", "skip-invalid", "snap", "dedupe", "allow-empty-prompt",
        "on-truncate", "faults-file",
    ),
    "Rows that do not say": (
        "negative-prompt", "size", "width", "height", "steps", "guidance", "true-cfg-scale", "num-images", "jobs", "frames", "num-frames",
        "fps", "strength", "lora", "seed",
    ),
    "The run": (
        "output", "state", "new", "take-over", "shard", "stop-at", "max-hours", "smoke", "retry-failed", "verify", "overwrite",
        "job-timeout",
    ),
    "Looking": ("watch", "interval", "partial", "copy"),
    "What is written": ("name", "image-format", "image-quality", "png-compression", "video-format", "events"),
    "What is said": ("policy-only", "rehearse", "show-residency", "explain", "preview", "json", "quiet", "verbose", "debug"),
    "Settings": ("config", "preset", "local-settings"),
}  # fmt: skip


def long_name(parameter: click.Parameter) -> str:
    """The long option without dashes, the first one where there are several."""
    return next((text for text in parameter.opts if text.startswith("--")), parameter.opts[0]).lstrip("-")


class SectionedCommand(click.Command):
    """A click command with short help first."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params.append(click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show every option.",
        ))  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self._look_for_swallowed(args)
        self._look_for_blank(ctx, args)
        return super().parse_args(ctx, args)

    def _look_for_blank(self, ctx: click.Context, args: Sequence[str]) -> None:
        """Refuses `-o "$OUT"` of a shell that knows no OUT: a blank path would be the folder that one is in."""
        if "" not in args and not any(text.endswith("=") for text in args):
            return
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        for part in self.params:
            value = given.get(part.name or "")
            if (value == "" or (isinstance(value, list | tuple) and "" in value)) and part.name not in MAY_BE_BLANK:
                name = f"--{long_name(part)}" if isinstance(part, click.Option) else part.make_metavar(ctx).strip("[].")
                raise UsageError(f"{name} is blank", option=name, hint="Say what it is; is a variable of the shell not set?")

    def _look_for_swallowed(self, args: Sequence[str]) -> None:
        """Refuses `--gpu --json`, which click would read as a card of that name. `--gpu=--json` means it."""
        options = [part for part in self.params if isinstance(part, click.Option)]
        takers = {text for part in options if not part.is_flag and not part.count for text in part.opts}
        known = {text for part in options for text in (*part.opts, *part.secondary_opts)}
        values = iter(args)
        for text in values:
            if text == "--":
                return
            if text in takers and (value := next(values, None)) is not None and value.partition("=")[0] in known:
                message = f"{text} needs a value, and {value} behind it is an option"
                raise UsageError(message, option=text, hint=f"To mean it all the same: {text}={value}")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {long_name(part): part for part in self.get_params(ctx) if isinstance(part, click.Option) and not part.hidden}
        if not ctx.meta.get("batchgen.help-all"):
            self._short(ctx, formatter, options)
            return
        left = {name: record for name, option in options.items() if (record := option.get_help_record(ctx)) is not None}
        for title, names in SECTIONS.items():
            _section(formatter, title, [left.pop(name) for name in names if name in left])
        _section(formatter, "Other", list(left.values()))

    def _short(self, ctx: click.Context, formatter: click.HelpFormatter, options: Mapping[str, click.Option]) -> None:
        if self.name in SHORT:
            width = max(len(_written(options[name], takes)) for rows in SHORT[self.name].values() for name, takes, _ in rows)
            for title, rows in SHORT[self.name].items():
                _section(formatter, title, [(_written(options[name], takes).ljust(width), text) for name, takes, text in rows])
        else:
            shown = [option.get_help_record(ctx) for name, option in options.items() if name not in {*COMMON, "help"}]
            _section(formatter, "Options", [record for record in shown if record is not None])
        left = len(options) - 2  # --help and --help-all themselves
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"--help-all shows all {left} options by topic, and how settings files and the environment set them.")


def _written(option: click.Option, takes: str) -> str:
    short = [text for text in option.opts if not text.startswith("--")]
    return ", ".join([*short, f"--{long_name(option)}"]) + (f" {takes}" if takes else "")


def _section(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def _show_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta["batchgen.help-all"] = True
        click.echo(context.get_help())
        click.echo(
            "\nEvery option can also be set by BATCHGEN_<OPTION>, in a file (--config FILE, ./batchgen.toml) or by --preset NAME."
        )
        context.exit()
