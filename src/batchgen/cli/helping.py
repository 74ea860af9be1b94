"""Help that fits a screen: a command with many options shows the ones people use first; --help-all shows all of them, in sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

# What `--help` of a command with many options shows, in this order. A command that is not here shows everything.
FIRST = {
    "run": (
        "model", "output", "new", "limit", "device", "batch-size", "performance-mode", "component-residency", "dtype", "size", "steps",
        "guidance", "negative-prompt", "num-images", "skip-invalid", "retry-failed", "stop-at", "image-format", "config", "preset",
    ),
    "plan": (
        "model", "profile", "device", "device-memory", "gpu", "platform", "performance-mode", "component-residency", "batch-size", "dtype",
        "policy-only", "show-residency", "explain", "json",
    ),
    "check": ("model", "format", "prompt-column", "name", "size", "snap", "skip-invalid", "on-truncate", "faults-file", "json"),
}  # fmt: skip

# Sections of --help-all; an option that none names stands under "Other".
SECTIONS = {
    "Model": (
        "model", "revision", "variant", "dtype", "trust-remote-code", "allow-pickle", "cache-dir", "profile", "profile-file", "model-facts",
    ),
    "Devices": (
        "device", "devices", "device-memory", "gpu", "compare", "platform", "workers", "threads", "reserve-vram", "host-memory",
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
    "The run": ("output", "new", "stop-at", "max-hours", "smoke", "retry-failed", "verify", "overwrite", "job-timeout"),
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
        if self.name in FIRST:
            self.params.append(click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show every option.",
            ))  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                records[long_name(parameter)] = record
        if self.name not in FIRST:
            _section(formatter, "Options", list(records.values()))
            return
        if not ctx.meta.get("batchgen.help-all"):
            shown = [records[name] for name in (*FIRST[self.name], "help", "help-all") if name in records]
            _section(formatter, "Options", shown)
            return
        left = dict(records)
        for title, names in SECTIONS.items():
            _section(formatter, title, [left.pop(name) for name in names if name in left])
        _section(formatter, "Other", list(left.values()))


def _section(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def _show_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta["batchgen.help-all"] = True
        click.echo(context.get_help())
        context.exit()
