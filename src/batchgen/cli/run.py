"""`batchgen run`: render a manifest, or go on where an earlier run of it stopped."""

from __future__ import annotations

import click

from batchgen.cli.manifest_options import manifest_options
from batchgen.cli.model_options import model_options
from batchgen.cli.placement_options import placement_options
from batchgen.cli.run_options import RunOptions, run_options
from batchgen.cli.settings import resolved_settings
from batchgen.errors import UsageError
from batchgen.inventory.model import ModelOptions
from batchgen.manifest.options import ManifestOptions
from batchgen.plan.records import Overrides


@click.command(epilog="Exit codes: 0 all done; 1 could not go on; 2 refused; 3 some jobs failed; 130, 143, 129 stopped by a signal.")
@click.argument("manifest", metavar="MANIFEST")
@model_options
@run_options
@manifest_options
@placement_options
@click.pass_context
def command(
    context: click.Context, manifest: str, model: str | None, model_options: ModelOptions, run: RunOptions,
    manifest_options: ManifestOptions, overrides: Overrides,
) -> int:
    """Render every row of MANIFEST (.csv, .tsv, .jsonl, .json, .txt, a folder of texts, or - for standard input).

    \b
    batchgen run prompts.csv --model Qwen/Qwen-Image
    batchgen run prompts.csv --model ./my-model --limit 8
    batchgen run prompts.csv --model builtin -o out --preset draft

    Run it again to go on where it stopped: nothing is rendered twice.
    """
    if model is None:
        raise UsageError(
            "no model is named", option="--model",
            hint="Name a hub id or a folder, e.g. --model Qwen/Qwen-Image; --model builtin needs no download. "
            "BATCHGEN_MODEL or `model = ...` in batchgen.toml does as well.",
        )
    # The worker takes seconds to import torch and diffusers: it begins before anything else is loaded.
    from batchgen.execute.process import prewarm

    worker = prewarm() if run.engine == "local" else None
    from batchgen.cli.rendering import render
    from batchgen.cli.request import RenderRequest

    request = RenderRequest(manifest, model, model_options, overrides, manifest_options, run, tuple(resolved_settings(context)))
    return render(request, worker).exit_code
