"""Where a run's workers are to be: processes of this machine, or actors on the machines of a Ray cluster (`--engine ray`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from batchgen.cli.request import Facts, RenderRequest
from batchgen.cli.run_options import RunOptions
from batchgen.errors import UsageError
from batchgen.execute.launch import Launcher
from batchgen.inventory import device
from batchgen.inventory.records import DeviceFacts, Platform

RAY_EXTRA = "python -m pip install 'batchgen[ray]'"


@dataclass(frozen=True, slots=True)
class Workplace:
    """The devices to plan for, and how workers on them are started."""

    platform: Platform
    devices: tuple[DeviceFacts, ...]
    largest_group: int | None = None  # devices of one machine, where there are several
    launcher: Callable[[RenderRequest, Facts], Launcher | None] = lambda request, facts: None  # None: processes of this machine
    groups: Callable[[Facts], tuple[tuple[str, ...], ...]] | None = None  # names of one worker's devices, where it sees no others


@contextmanager
def workplace(run: RunOptions) -> Iterator[Workplace]:
    """The run's; a cluster is connected while entered. Raises UsageError."""
    if run.engine == "ray":
        with _cluster(run) as found:
            yield found
        return
    if run.ray_address is not None:
        raise UsageError("--ray-address goes with --engine ray", option="--ray-address", hint="Add --engine ray, or leave it out.")
    yield Workplace(*device.probe(run.devices or None))


@contextmanager
def _cluster(run: RunOptions) -> Iterator[Workplace]:
    if run.devices not in ((), ("cpu",), ("cuda",)):
        raise UsageError(
            f"--device {','.join(run.devices)} names devices of one machine; a Ray cluster hands out its own", option="--device",
            hint="Leave it out, or write --device cpu to render on processors. --workers N limits how many workers there are.",
        )
    try:
        from batchgen.execute import ray_cluster
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        message = "--engine ray needs the package ray, which comes with the extra batchgen[ray]"
        raise UsageError(message, option="--engine", hint=f"Install it: {RAY_EXTRA}") from None
    with ray_cluster.connected(run.ray_address):
        found = ray_cluster.cluster_facts("cpu" if run.devices == ("cpu",) else None)
        if run.devices == ("cuda",) and found.platform != "cuda":
            raise UsageError("--device cuda: no machine of the cluster has a GPU that Ray knows of", option="--device",
                             hint="`ray status` lists the cluster's resources.")  # fmt: skip

        def launcher(request: RenderRequest, facts: Facts) -> Launcher:
            gpus = facts.plan.group_size if facts.platform == "cuda" else 0
            model = ray_cluster.ModelSource(
                facts.model.source, facts.model.kind, facts.model.revision, request.model_options, facts.platform)
            return ray_cluster.RayLauncher(
                ray_cluster.ENGINE, gpus=gpus, workers=request.run.workers, model=model, cfg_parallel=facts.plan.cfg_parallel,
                cpus=request.run.threads or 1,
            )  # fmt: skip

        yield Workplace(found.platform, found.devices, found.largest_group, launcher, _own_devices)


def _own_devices(facts: Facts) -> tuple[tuple[str, ...], ...]:
    """Each worker sees its own devices alone, numbered from 0."""
    names = [f"cuda:{number}" for number in range(facts.plan.group_size)] if facts.platform == "cuda" else ["cpu"]
    return (tuple(names),)
