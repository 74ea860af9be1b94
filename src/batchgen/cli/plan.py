"""`batchgen plan`: decide where a model lives on some devices, and explain it. Touches no weights and writes nothing but its cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from batchgen.cli.model_options import model_options
from batchgen.cli.placement_options import placement_options
from batchgen.errors import ModelError, UsageError
from batchgen.inventory import catalogue, device, profiles, stated
from batchgen.inventory.options import ModelOptions
from batchgen.inventory.records import DeviceFacts, ModelFacts, Platform, Profile
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Overrides, Plan, PlanFacts
from batchgen.report import plan_text
from batchgen.report.plan_json import plan_object


@dataclass(frozen=True, slots=True)
class Subject:
    """What a plan is about, beside the devices: which model, by which of the ways to name one."""

    model: str | None
    options: ModelOptions
    facts_file: Path | None
    profile: str | None
    profile_file: Path | None


@click.command(help="Decide where each component of a model lives, and explain it. Renders nothing.")
@click.argument("manifest", required=False)
@model_options
@click.option("--profile", metavar="NAME", help="Deployment profile, instead of the one found for the model.")
@click.option("--profile-file", type=click.Path(path_type=Path), metavar="FILE", help="Your own deployment profile (TOML).")
@click.option("--model-facts", "facts_file", type=click.Path(path_type=Path), metavar="FILE", help="A model by its numbers (JSON).")
@click.option("--device", "--devices", "devices", multiple=True, metavar="LIST", help="Devices at hand: cuda:0, cuda, a UUID, mps, cpu.")
@click.option("--device-memory", multiple=True, metavar="TOTAL[:AVAILABLE]", help="A device that is not here, in GiB; once a device.")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME[xN]", help='Cards of the catalogue, like "RTX 4090" or "H100 80GBx8".')
@click.option("--platform", metavar="cuda|mps|cpu", help="Plan for this platform; default: the one at hand.")
@placement_options
@click.option("--policy-only", is_flag=True, help="Rules only: nothing is rehearsed.")
@click.option("--show-residency", is_flag=True, help="A table of every component: where it lives, who decided, why.")
@click.option("--explain", is_flag=True, help="The whole trail of decisions.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    manifest: str | None, model: str | None, model_options: ModelOptions, profile: str | None, profile_file: Path | None,
    facts_file: Path | None, devices: tuple[str, ...], device_memory: tuple[str, ...], gpus: tuple[str, ...], platform: str | None,
    overrides: Overrides, policy_only: bool, show_residency: bool, explain: bool, as_json: bool,
) -> int:  # fmt: skip
    if manifest is not None and manifest != "-" and not Path(manifest).exists():
        raise UsageError(f"there is no manifest {manifest!r}", hint="Name a file that is there, or leave it out.")
    subject = Subject(model, replace(model_options, download=False), facts_file, profile, profile_file)
    plan = policy_plan(subject, overrides, *find_devices(devices, device_memory, gpus, platform))
    show(plan, show_residency=show_residency, explain=explain, as_json=as_json)
    return 0


def find_devices(
    devices: Sequence[str], device_memory: Sequence[str], gpus: Sequence[str], platform: str | None
) -> tuple[Platform, tuple[DeviceFacts, ...]]:
    """The devices to plan for: stated ones, or those at hand. Raises UsageError."""
    if not device_memory and not gpus:
        return device.probe(devices or None, platform=platform)
    if devices:
        raise UsageError("--device names devices at hand, --device-memory and --gpu such that are not", option="--device",
                         hint="Use one or the other.")  # fmt: skip
    wanted: Platform = "cuda" if platform is None else device.check_platform(platform)
    if gpus and wanted != "cuda":
        raise UsageError(f"--gpu: the catalogue has CUDA cards only, not for {wanted}", option="--gpu", hint="Use --device-memory.")
    found = (*device.stated(device_memory, wanted), *catalogue.cards(gpus))
    return wanted, tuple(replace(facts, torch_name=device.torch_name(wanted, number)) for number, facts in enumerate(found))


def policy_plan(subject: Subject, overrides: Overrides, platform: Platform, devices: tuple[DeviceFacts, ...]) -> Plan:
    """The plan by the rules for a model that is here, stated, or known by its profile alone. Raises RefusedError."""
    facts, profile = find_model(subject, platform)
    return make_plan(PlanFacts(facts, profile, platform, devices, overrides))


def find_model(subject: Subject, platform: Platform) -> tuple[ModelFacts, Profile]:
    """The model's facts and its profile, by the way the user named it; without a name: the default model's profile."""
    if subject.model is not None and subject.facts_file is not None:
        raise UsageError("--model and --model-facts both name a model", option="--model-facts", hint="Give one of them.")
    name, file = subject.profile, subject.profile_file
    if subject.facts_file is not None:
        facts, own = stated.read_model_facts(subject.facts_file)
        if file is None and name is None:
            name = own
        return facts, profiles.find_profile(facts, name=name, file=file)
    if subject.model is not None:
        return _named_model(subject.model, subject, platform)
    profile = profiles.find_profile(None, name=name, file=file)
    return stated.profile_facts(profile, profiles.DEFAULT_MODEL if name is None and file is None else None), profile


def _named_model(model: str, subject: Subject, platform: Platform) -> tuple[ModelFacts, Profile]:
    from batchgen.inventory.model import looks_like_hub_id, resolve  # not needed for a model that is only stated

    try:
        facts = resolve(model, subject.options, platform=platform)
    except ModelError as error:
        # A hub model that cannot be reached is still known by its profile; a folder that is broken is not.
        known = profiles.profile_of_id(model) if looks_like_hub_id(model) and not Path(model).exists() else None
        if known is None or subject.options.revision is not None:
            raise
        click.echo(f"note: {error.message.splitlines()[0]}; planning {model} from its profile, sizes unknown", err=True)
        profile = known if subject.profile is None and subject.profile_file is None else None
        profile = profile or profiles.find_profile(None, name=subject.profile, file=subject.profile_file)
        return stated.profile_facts(known, model), profile
    return facts, profiles.find_profile(facts, name=subject.profile, file=subject.profile_file)


def show(plan: Plan, *, show_residency: bool, explain: bool, as_json: bool) -> None:
    """JSON alone, or tables; without a wish for either, a few plain lines."""
    if as_json:
        click.echo(json.dumps(plan_object(plan), ensure_ascii=False, allow_nan=False))
        return
    if not show_residency and not explain:
        for line in plan_text.summary_lines(plan):
            click.echo(line)
        for placement in plan.placements:
            click.echo(f"{plan_text.plain(placement.component)}: {placement.mode}")
        click.echo("--show-residency says who decided and why, --explain how")
        return
    from batchgen.report import plan_tables  # rich is loaded only where something is printed with it

    _print(*([plan_tables.residency_table(plan)] if show_residency else []), *([plan_tables.trail_table(plan)] if explain else []))


def _print(*tables: Any) -> None:
    from rich.console import Console

    console = Console()
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)
