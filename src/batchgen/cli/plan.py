"""`batchgen plan`: decide where a model lives on some devices, and explain it. Touches no weights and writes nothing but its cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from batchgen.cli.model_options import model_options
from batchgen.cli.placement_options import placement_options
from batchgen.cli.workload_options import WorkloadOptions, shapes_to_plan, workload_options
from batchgen.errors import ModelError, PlanRefusedError, UsageError
from batchgen.inventory import catalogue, device, profiles, stated
from batchgen.inventory.options import ModelOptions
from batchgen.inventory.records import DeviceFacts, ModelFacts, Platform, Profile
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Overrides, Plan, PlanFacts
from batchgen.report import plan_text
from batchgen.report.plan_json import plan_object

if TYPE_CHECKING:
    from batchgen.cli.fitting import Shapes


@dataclass(frozen=True, slots=True)
class Subject:
    """What a plan is about, beside the devices: which model, by which of the ways to name one."""

    model: str | None
    options: ModelOptions
    facts_file: Path | None
    profile: str | None
    profile_file: Path | None


def _names(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Names of cards, repeated or with commas."""
    names = [name.strip() for value in values for name in value.split(",")]
    if not all(names):
        raise click.BadParameter('names no card; write it like "RTX 4090,H100 80GBx8"', context, parameter)
    return tuple(names)


@click.command(help="""Decide where each component of a model lives, and explain it. Renders nothing.

\b
batchgen plan --show-residency
batchgen plan prompts.csv --model Qwen/Qwen-Image --gpu "RTX 4090"
batchgen plan --compare "RTX 4090,L40S,H100 80GB" --size 1024x1024
""")
@click.argument("manifest", required=False)
@model_options
@click.option("--model-facts", "facts_file", type=click.Path(path_type=Path), metavar="FILE", help="A model by its numbers (JSON).")
@click.option("--device", "--devices", "devices", multiple=True, metavar="LIST", help="Devices at hand: cuda:0, cuda, a UUID, mps, cpu.")
@click.option("--device-memory", multiple=True, metavar="TOTAL[:AVAILABLE]", help="A device that is not here, in GiB; once a device.")
@click.option(
    "--gpu", "gpus", multiple=True, metavar="NAME[xN]", callback=_names, help='Cards of the catalogue, like "RTX 4090" or "H100 80GBx8".',
)
@click.option("--platform", metavar="cuda|mps|cpu", help="Plan for this platform; default: the one at hand.")
@placement_options
@workload_options
@click.option("--compare", multiple=True, metavar="NAME,...", callback=_names, help="One row a card: what fits, how fast. Repeatable.")
@click.option("--rehearse/--no-rehearse", default=None, help="Rehearse the model without weights; default: on CUDA.")
@click.option("--policy-only", is_flag=True, help="Rules only: nothing is rehearsed.")
@click.option("--show-residency", is_flag=True, help="A table of every component: where it lives, who decided, why.")
@click.option("--explain", is_flag=True, help="The whole trail of decisions.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    manifest: str | None, model: str | None, model_options: ModelOptions,
    facts_file: Path | None, devices: tuple[str, ...], device_memory: tuple[str, ...], gpus: tuple[str, ...], platform: str | None,
    overrides: Overrides, workload: WorkloadOptions, compare: tuple[str, ...], rehearse: bool | None, policy_only: bool,
    show_residency: bool, explain: bool, as_json: bool,
) -> int:  # fmt: skip
    if manifest is not None and manifest != "-" and not Path(manifest).exists():
        raise UsageError(f"there is no manifest {manifest!r}", hint="Name a file that is there, or leave it out.")
    own_profile = Path(overrides.profile_file) if overrides.profile_file is not None else None
    subject = Subject(model, replace(model_options, download=False), facts_file, overrides.profile, own_profile)
    if compare:
        _refuse_beside_compare(click.get_current_context())
        show_compared(compare, subject, overrides, manifest, workload, as_json=as_json)
        return 0
    where, found = find_devices(devices, device_memory, gpus, platform)
    facts = _with_adapters(plan_facts(subject, overrides, where, found), workload)
    # what is asked for is checked whether or not it is rehearsed
    shapes = shapes_to_plan(manifest, facts.model, facts.profile, workload)
    plan = make_plan(facts)
    wanted = rehearse if rehearse is not None else where == "cuda"
    if wanted and not policy_only:
        at_hand = not device_memory and not gpus
        plan = fitted(plan, facts, shapes, workload, at_hand=at_hand, trust_remote_code=model_options.trust_remote_code)
    else:
        by = "--policy-only" if policy_only else "--no-rehearse" if rehearse is False else None
        if (warning := plan_text.too_large(plan, unfitted_by=by)) is not None:
            click.echo(f"warning: {plan_text.plain(warning)}", err=True)
    show(plan, show_residency=show_residency, explain=explain, as_json=as_json)
    if not plan.stages and not as_json and (manifest is not None or workload.said):
        click.echo(plan_text.jobs_line(shapes.counts, assumed=shapes.assumed))
    return 0


# What --compare has no use for: it compares cards of the catalogue by their rehearsals, in a table of its own.
_NOT_BESIDE_COMPARE = ("gpus", "devices", "device_memory", "platform", "policy_only", "rehearse", "show_residency", "explain")


def _refuse_beside_compare(context: click.Context) -> None:
    """Raises UsageError for an option on the command line that --compare would leave unheard. --rehearse is what it does anyway."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in _NOT_BESIDE_COMPARE or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if name == "rehearse" and context.params[name]:
            continue
        option = "--no-rehearse" if name == "rehearse" else parameter.opts[0]
        hint = "Name every card in --compare." if name in ("gpus", "devices", "device_memory", "platform") else "Leave out one of them."
        raise UsageError(f"{option} has no place beside --compare, which rehearses cards of the catalogue", option=option, hint=hint)


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


def plan_facts(subject: Subject, overrides: Overrides, platform: Platform, devices: tuple[DeviceFacts, ...]) -> PlanFacts:
    """What the rules look at, for a model that is here, stated, or known by configs or its profile. Raises RefusedError."""
    facts, profile = find_model(subject, platform)
    return PlanFacts(facts, profile, platform, devices, overrides)


def _with_adapters(facts: PlanFacts, workload: WorkloadOptions) -> PlanFacts:
    if not workload.loras:
        return facts
    from batchgen.cli.fitting import adapted

    return replace(facts, adapted=adapted(workload.loras, facts.model))


def fitted(
    plan: Plan, facts: PlanFacts, shapes: Shapes, workload: WorkloadOptions, *, at_hand: bool, trust_remote_code: bool,
) -> Plan:  # fmt: skip
    """The plan with the rehearsal's numbers. Raises PlanRefusedError where nothing fits."""
    # Tables of a plan by the rules need none of this.
    from batchgen.cli.fitting import rehearse_and_fit
    from batchgen.inventory.host import host_memory
    from batchgen.plan.fit import FitOptions

    host = workload.host_bytes
    if host is None and at_hand:
        host = host_memory()[1]
    options = FitOptions(reserve_bytes=workload.reserve_bytes, host_available_bytes=host)
    return rehearse_and_fit(
        plan, facts, shapes, options, note=lambda line: click.echo(line, err=True), trust_remote_code=trust_remote_code,
        loras=workload.loras)  # fmt: skip


def show_compared(
    names: Sequence[str], subject: Subject, overrides: Overrides, manifest: str | None, workload: WorkloadOptions, *, as_json: bool,
) -> None:  # fmt: skip
    """One plan a card, side by side; a card on which nothing fits is a row too."""
    from batchgen.report.fit_tables import Compared, compare_table

    found = [(name, catalogue.cards((name,), option="--compare")) for name in names]  # all names are right before anything is rehearsed
    model, profile = find_model(subject, "cuda")
    shapes = shapes_to_plan(manifest, model, profile, workload)
    rows = []
    for name, devices in found:
        facts = _with_adapters(PlanFacts(model, profile, "cuda", devices, overrides), workload)
        try:
            plan = fitted(make_plan(facts), facts, shapes, workload, at_hand=False,
                          trust_remote_code=subject.options.trust_remote_code)  # fmt: skip
            rows.append(Compared(name, plan))
        except PlanRefusedError as error:
            rows.append(Compared(name, None, error.message))
    if as_json:
        cards = [{"card": row.card, "plan": plan_object(row.plan) if row.plan else None, "refused": row.refused or None} for row in rows]
        click.echo(json.dumps({"schema": 1, "cards": cards}, ensure_ascii=False, allow_nan=False))
        return
    _print(compare_table(rows))


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
    if name is None and file is None:
        return _known_model(profiles.DEFAULT_MODEL, subject, platform) or _by_profile(name, file)
    return _by_profile(name, file)


def _by_profile(name: str | None, file: Path | None) -> tuple[ModelFacts, Profile]:
    profile = profiles.find_profile(None, name=name, file=file)
    return stated.profile_facts(profile, profiles.DEFAULT_MODEL if name is None and file is None else None), profile


def _known_model(model: str, subject: Subject, platform: Platform) -> tuple[ModelFacts, Profile] | None:
    """A model whose component configs come with batchgen."""
    from batchgen.inventory.known import known_facts

    facts = known_facts(model, subject.options, platform=platform)
    if facts is None:
        return None
    known = profiles.profile_of_id(model)
    if known is None or subject.profile is not None or subject.profile_file is not None:
        known = profiles.find_profile(facts, name=subject.profile, file=subject.profile_file)
    return facts, known


def _named_model(model: str, subject: Subject, platform: Platform) -> tuple[ModelFacts, Profile]:
    from batchgen.inventory.model import looks_like_hub_id, resolve  # not needed for a model that is only stated

    hub = looks_like_hub_id(model) and not Path(model).exists()
    by_configs = _known_model(model, subject, platform) if hub and subject.options.revision is None else None
    # a plan of a model whose configs come with batchgen asks no network: the cache, else those
    options = replace(subject.options, offline=True) if by_configs is not None else subject.options
    try:
        facts = resolve(model, options, platform=platform)
    except ModelError as error:
        if by_configs is not None:
            click.echo(f"note: {model} is not in the cache; it is planned from its published configs", err=True)
            return by_configs
        # A hub model that cannot be reached is still known by its profile; a folder that is broken is not.
        known = profiles.profile_of_id(model) if hub else None
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
        if plan.stages:
            from batchgen.report.fit_tables import stages_table

            click.echo()
            _print(stages_table(plan))
        click.echo("--show-residency says who decided and why, --explain how")
        return
    from batchgen.report import plan_tables  # rich is loaded only where something is printed with it
    from batchgen.report.devices_table import devices_table
    from batchgen.report.fit_tables import stages_table

    shown = [plan_tables.residency_table(plan)] if show_residency else []
    if show_residency and len(plan.devices) > 1:
        shown.append(devices_table(plan))
    if show_residency and plan.stages:
        shown.append(stages_table(plan))
    _print(*shown, *([plan_tables.trail_table(plan)] if explain else []))


def _print(*tables: Any) -> None:
    from batchgen.report.console import console
    from batchgen.report.tables import print_parts

    print_parts(tables, console(sys.stdout))
