"""`batchgen check`: everything that can be known of a manifest before a model is touched, as tables or as one JSON object."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.manifest_options import manifest_options
from batchgen.cli.model_options import model_options
from batchgen.cli.numbers import WholeRange
from batchgen.errors import EXIT_DONE, EXIT_REFUSED, Fault, ManifestError, UsageError
from batchgen.inventory.model import ModelOptions
from batchgen.inventory.prompt_limits import SEVERAL_IMAGES
from batchgen.jobs import Job
from batchgen.manifest import ManifestOptions, ManifestSummary, jobs, survey
from batchgen.report.safe import printable
from batchgen.units import counted

if TYPE_CHECKING:
    from batchgen.report.sheet import Sheet

SHAPES_SHOWN = 12
STDIN = "<stdin>"
# what a run can carry out, if its model takes it
PICTURE_INPUTS = frozenset({"image", "last_image", "mask", "strength", SEVERAL_IMAGES})
LORA_INPUT = frozenset({"lora"})


@click.command(epilog="Exit codes: 0 no faults; 2 faults.")
@click.argument("manifest", metavar="MANIFEST")
@model_options
@manifest_options
@click.option("--limit", type=WholeRange(min=1), metavar="N", help="Only the first N rows.")
@click.option("--preview", type=WholeRange(min=0), default=5, show_default=True, metavar="N", help="Jobs to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    manifest: str, model: str | None, model_options: ModelOptions, manifest_options: ManifestOptions, limit: int | None, preview: int,
    as_json: bool,
) -> int:
    """Check MANIFEST: counts, shapes, faults, warnings, and what the outputs would be called.

    \b
    batchgen check prompts.csv
    batchgen check prompts.csv --model Qwen/Qwen-Image
    cat prompts.txt | batchgen check - --format txt
    """
    options = replace(manifest_options, limit=limit)
    if model is not None:
        options = with_model(options, model, model_options)
    else:
        options = replace(options, inputs_supported=PICTURE_INPUTS | LORA_INPUT)
    with manifest_file(manifest, options.format) as (path, shown):
        options = replace(options, shown_as=shown)
        summary = survey(path, options)
        good = not summary.fault_total or (options.skip_invalid and not summary.fatal and summary.jobs > 0)
        shown_jobs = list(islice(jobs(path, options), preview)) if good and not as_json else []
    if as_json:
        click.echo(json.dumps(as_object(summary), allow_nan=False))
    else:
        _show(summary, shown_jobs, model is not None, good)
    return EXIT_DONE if good else EXIT_REFUSED


@contextmanager
def manifest_file(given: str, kind: str | None) -> Iterator[tuple[str, str | None]]:
    """(path to read, name for messages). Standard input is copied to a file, since a manifest is read twice."""
    if given != "-":
        yield given, None
        return
    if kind is None:
        hint = "Say --format csv, tsv, jsonl, json, txt or parquet."
        raise UsageError("standard input has no name that tells its kind", option="--format", hint=hint)
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
        copy = Path(folder) / f"manifest.{kind}"
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield str(copy), STDIN


def with_model(options: ManifestOptions, model: str, model_options: ModelOptions) -> ManifestOptions:
    """The options with what the model decides, from its configs and headers alone."""
    # Only a check against a model needs these.
    from batchgen.cli.request import model_stem, with_profile
    from batchgen.inventory.model import resolve
    from batchgen.inventory.profiles import find_profile
    from batchgen.inventory.prompt_limits import picture_inputs, prompt_limits, takes_negative_prompt
    from batchgen.inventory.rules import size_rules

    facts = resolve(model, replace(model_options, download=False), platform="cpu")
    profile = find_profile(facts)
    return replace(
        options, defaults=with_profile(options.defaults, profile), rules=size_rules(facts), tokenizers=prompt_limits(facts),
        inputs_supported=picture_inputs(facts) | LORA_INPUT, takes_negative_prompt=takes_negative_prompt(facts),
        model_name=model_stem(model), model_revision=facts.revision, extension=".mp4" if profile.task == "video" else ".png",
    )


def as_object(summary: ManifestSummary) -> dict[str, Any]:
    """The JSON object of `check --json`. `faults` holds the first ones where there are very many; `fault_count` all."""
    return {
        "schema": 1,
        "rows": summary.rows,
        "jobs": summary.jobs,
        "shapes": [{"text": count.shape.text, "jobs": count.jobs, **asdict(count.shape)} for count in summary.shapes],
        "faults": [_fault_object(fault) for fault in summary.faults],
        "warnings": [asdict(notice) | {"text": str(notice)} for notice in summary.warnings],
        "fault_count": summary.fault_total,
        "fault_kinds": dict(summary.fault_counts),
        "kind": summary.kind,
        "extra_columns": list(summary.extra_columns),
    }


def _fault_object(fault: Fault) -> dict[str, Any]:
    return {
        "row": fault.row, "column": fault.column, "value": fault.value, "message": f"{fault.message}; {fault.fix}", "kind": fault.kind,
        "file": fault.file,
    }


def _show(summary: ManifestSummary, shown: Sequence[Job], with_model: bool, good: bool) -> None:
    # rich is loaded only where a table is printed
    from batchgen.report.console import console as console_of

    console = console_of(sys.stdout, soft_wrap=True)
    rows, pictures = counted(summary.rows, "row"), counted(summary.jobs, "job")
    console.print(f"{printable(summary.path)}: {summary.kind}, {rows}, {pictures}, {counted(len(summary.shapes), 'shape')}")
    if summary.jobs:
        console.print(shape_table(summary))
    if shown:
        console.print(job_table(shown))
        if summary.jobs > len(shown):
            console.print(f"... and {counted(summary.jobs - len(shown), 'more job')}")
    for notice in summary.warnings:
        console.print(f"warning: {printable(str(notice))}")
        for example in notice.examples if notice.rows else ():
            console.print(f"    {printable(example)}")
    if not with_model and good:
        console.print("Not checked without --model: which sizes it can make, how long a prompt it reads.")
    if not summary.fault_total:
        console.print("No faults.")
        return
    error = ManifestError(summary.faults, total=summary.fault_total, counts=dict(summary.fault_counts))
    console.print(f"{counted(summary.fault_total, 'fault')}:")
    console.print(printable(error.message, keep="\n"))
    if error.hint:
        console.print(error.hint)
    if good:
        console.print(f"--skip-invalid leaves out {counted(len(summary.skipped), 'row')}.")


def shape_table(summary: ManifestSummary) -> Sheet:
    """Jobs by shape, the commonest first."""
    from batchgen.report.sheet import Column, Sheet

    table = Sheet("Shapes", (Column("shape", "text"), Column("jobs", "number")))
    shown = summary.shapes[:SHAPES_SHOWN]
    alike = Counter(count.shape.text for count in shown)  # but for their frames a second, which the text leaves out
    for count in shown:
        fps = "" if alike[count.shape.text] == 1 or count.shape.fps is None else f", {count.shape.fps:g} fps"
        table.add(count.shape.text.replace("?x?", "the model's own size") + fps, f"{count.jobs:,}")
    if len(summary.shapes) > SHAPES_SHOWN:
        rest = summary.shapes[SHAPES_SHOWN:]
        table.add(counted(len(rest), "other"), f"{sum(count.jobs for count in rest):,}")
    return table


def job_table(shown: Sequence[Job]) -> Sheet:
    """What the first jobs would be called and made from."""
    from batchgen.report.sheet import Column, Sheet

    table = Sheet("First jobs", (
        Column("row", "number"), Column("output", keep=1, label=""), Column("id"), Column("seed", "number"),
        Column("prompt", "text", label=""),
    ))
    for job in shown:
        seed = "drawn when run" if job.seed_source == "drawn" else str(job.seed)
        table.add(job.row, printable(job.output), printable(job.id, limit=24), seed, printable(job.prompt, limit=60))
    return table
