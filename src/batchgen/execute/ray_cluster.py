"""Workers on the machines of a Ray cluster: the launcher for `--engine ray`, and what the cluster has. Needs the extra `ray`.

Each worker is a Ray actor that holds the devices it renders on and runs the ordinary worker process (place.py). Machines may join
and go: a worker is started wherever its resources are free, and one that is lost with its machine is no job's fault.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

# Ray reads these when it is imported: nothing is reported to anybody, and a worker without devices keeps its own environment.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import ray._private.worker as ray_driver
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batchgen import __version__
from batchgen.errors import UsageError
from batchgen.events import Event
from batchgen.execute.launch import Message
from batchgen.execute.place import Ending, ModelSource, Place
from batchgen.execute.process import received
from batchgen.execute.ray_address import refuse_dead, silent
from batchgen.execute.settings import ENGINE, Shutdown
from batchgen.inventory import device
from batchgen.inventory.records import DeviceFacts, Platform

__all__ = ["ENGINE", "ClusterFacts", "ModelSource", "RayLauncher", "RayWorker", "cluster_facts", "connected"]

_POLL_SECONDS = 5.0  # that one question for events waits for some
_ANSWER_SECONDS = 60.0  # beyond which a question counts as unanswered
_RETRY_SECONDS = 0.5
_BURIAL_SECONDS = 3.0  # between an actor's death notice and its machine's, at most
_PROBE_SECONDS = 120.0
_CALLS = 8  # at once, to one actor


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """While entered: this process drives a cluster. None: the one of RAY_ADDRESS or of this machine, else one made for this run.

    Raises UsageError for a cluster that does not answer, within seconds where nothing is there.
    """
    named = (os.environ.get("RAY_ADDRESS") or None) if address is None else address
    if named is not None:
        refuse_dead(named, said_by="RAY_ADDRESS" if address is None else "--ray-address")
    # Ray would print what its own processes say of a lost machine onto standard output, which holds the run's result; its logs have it.
    ray_driver.print_to_stdstream = _unprinted
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "critical", "namespace": "batchgen"}
    try:
        with silent():
            if named is not None:
                ray.init(address=address, **quiet)
            else:
                try:
                    ray.init(address="auto", **quiet)
                except ConnectionError:
                    ray.init(include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises plain ones where its own processes do not come up
        raise UsageError(
            f"the Ray cluster does not answer: {_first_line(error)}", option="--ray-address",
            hint="`ray status` on the same machine should answer.",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _unprinted(*args: Any, **more: Any) -> None:
    """In the place of Ray's printing."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What the machines of a cluster have for a run."""

    platform: Platform
    devices: tuple[DeviceFacts, ...]
    largest_group: int  # devices of one machine: a group of ranks does not reach beyond it


def cluster_facts(platform: Platform | None = None) -> ClusterFacts:
    """Devices of all machines, asked there. `platform` "cpu": their processors though they may have GPUs. Raises UsageError."""
    nodes = _nodes()
    ask = ray.remote(_probe)
    asked = [
        ask.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            0 if platform == "cpu" else int(node["Resources"].get("GPU", 0)))
        for node in nodes
    ]  # fmt: skip
    try:
        found: list[tuple[Platform, tuple[DeviceFacts, ...]]] = ray.get(asked, timeout=_PROBE_SECONDS)
    except RayError as error:
        raise UsageError(
            f"a machine of the cluster cannot say what it has: {_first_line(error)}", option="--ray-address",
            hint="Every machine needs the same Python and the same batchgen.",
        ) from error
    cards = [devices for where, devices in found if where == "cuda"]
    if not cards:
        least = min((devices[0] for _, devices in found), key=lambda facts: facts.available_bytes)
        return ClusterFacts("cpu", (least,), 1)
    every = [facts for devices in cards for facts in devices]
    return ClusterFacts(
        "cuda", tuple(replace(facts, torch_name=f"cuda:{number}") for number, facts in enumerate(every)), max(map(len, cards)),
    )


def _probe(gpus: int) -> tuple[Platform, tuple[DeviceFacts, ...]]:
    """On one machine: as many of its devices as Ray hands out there."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
        del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray hides them from a task that asks for none; this one only reads their sizes
    platform, devices = device.probe(None, platform="cuda" if gpus else "cpu")
    return platform, devices[:gpus] if gpus else devices


def _nodes() -> list[dict[str, Any]]:
    """The living machines."""
    found: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return found


def _first_line(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # what was raised over there, without Ray's frames
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _Actor(Place):
    """A place that knows which of the cluster's machines it is on, and how many worker processes that has room for."""

    def __init__(self, per_process: Mapping[str, float], *args: Any) -> None:
        """`per_process`: what one worker process holds of the machine's resources; the rest as Place."""
        own: Mapping[str, float] = next((node["Resources"] for node in _nodes() if node["NodeID"] == self.node()), {})
        super().__init__(*args, sharing=max(1, *(int(own.get(name, 0.0) / amount) for name, amount in per_process.items())))

    def node(self) -> str:
        found: str = ray.get_runtime_context().get_node_id()
        return found


class RayLauncher:
    """One actor a seat, as many as the cluster has room for."""

    grows = True

    def __init__(
        self, factory: str, *, gpus: int, workers: int | None = None, model: ModelSource | None = None, cfg_parallel: bool = False,
        cpus: int = 1,
    ) -> None:
        """`gpus`: devices of one worker, 0 on processors, where each takes `cpus`. `workers`: how many at most; None: on GPUs as many as
        there are, on processors one a machine."""
        self._factory = factory
        self._gpus = gpus
        self._cpus = cpus
        self._most = workers
        self._model = model
        self._cfg_parallel = cfg_parallel
        self._started: list[RayWorker] = []

    def start(self, group: Sequence[str]) -> RayWorker:
        needs: dict[str, float] = {"num_gpus": self._gpus, "num_cpus": 0} if self._gpus else {"num_cpus": self._cpus}
        make = ray.remote(_Actor).options(max_concurrency=_CALLS, max_restarts=0, scheduling_strategy="SPREAD", **needs)
        # on processors there is one worker a machine, if nobody says otherwise
        per_process = {"GPU": 1.0} if self._gpus else {"CPU": float(self._cpus)} if self._most is not None else {"CPU": math.inf}
        worker = RayWorker(make.remote(per_process, self._factory, tuple(group), self._cfg_parallel, self._model, __version__))
        self._started = [other for other in self._started if not other.closed] + [worker]
        return worker

    def room(self, held: int) -> int:
        """By what is free now; those started and not yet running have their part of it already."""
        free: Mapping[str, float] = ray.available_resources()
        by_resources = free.get("GPU", 0.0) / self._gpus if self._gpus else free.get("CPU", 0.0) / self._cpus
        unborn = sum(not worker.ready and not worker.ended() for worker in self._started)
        most = self._most if self._most is not None else math.inf if self._gpus else len(_nodes())
        return max(0, min(int(by_resources) - unborn, int(min(most, 2**30)) - held))

    def close(self) -> None:
        for worker in self._started:
            worker.kill()
            worker.close()


class RayWorker:
    """One actor as the supervisor sees it: a WorkerHandle. Events come through a pipe of this process, filled by a thread."""

    def __init__(self, actor: Any) -> None:
        self.cause: str | None = None
        self.closed = False
        self.lost = False
        self.pid = 0
        self.place = ""
        self._actor = actor
        self._node: str | None = None
        self._ending: Ending | None = None
        self._over = threading.Event()  # no event will come any more
        self._ours, self._theirs = Pipe(duplex=False)
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._running = threading.Event()
        threading.Thread(target=self._hear, name="ray events", daemon=True).start()
        threading.Thread(target=self._speak, name="ray messages", daemon=True).start()

    # --- what the supervisor calls --------------------------------------------------------------------------------

    @property
    def pipes(self) -> tuple[Connection, ...]:
        return (self._ours,)

    @property
    def ready(self) -> bool:
        return self._running.is_set()

    def send(self, message: Message) -> None:
        """In order; to a worker that has ended meanwhile nothing happens."""
        self._outbox.put(message)

    def received(self) -> tuple[list[Event], bool]:
        return received(self._ours)

    def ended(self) -> bool:
        return self._over.is_set()

    def show_stacks(self) -> None:
        if self.ready:
            with contextlib.suppress(RayError):
                ray.get(self._actor.show_stacks.remote(), timeout=_RETRY_SECONDS)

    def kill(self, cause: str | None = None) -> None:
        """Ends the worker, whatever it does, and the actor; what the worker said before is still received."""
        if cause is not None and self.cause is None:
            self.cause = cause
        if self.ready and not self._over.is_set():
            with contextlib.suppress(RayError):
                ray.get(self._actor.end.remote(cause), timeout=10.0)
            self._over.wait(_POLL_SECONDS)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor)

    def finish(self, seconds: float = 5.0) -> None:
        self.send(Shutdown())
        deadline = time.monotonic() + seconds
        while self.ready and not self.ended() and time.monotonic() < deadline:
            self.received()
            self._over.wait(0.02)
        self.kill()
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._outbox.put(None)
            self._over.wait(_RETRY_SECONDS)
            self._ours.close()

    def how_it_ended(self) -> str:
        if self.cause is not None:
            return self.cause
        return self._ending.how if self._ending is not None else "not heard of any more"

    def last_words(self) -> str:
        return self._ending.last_words if self._ending is not None else ""

    # --- threads --------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Asks for events until the worker or its machine is at its end; the pipe ends with it."""
        try:
            self._node = self._answer(lambda: self._actor.node.remote(), None)
            self.pid, self.place = self._answer(lambda: self._actor.about.remote(), _ANSWER_SECONDS)
            self._running.set()
            heard = 0
            while self._ending is None:
                events, ending = self._answer(lambda after=heard: self._actor.events.remote(after, _POLL_SECONDS), _ANSWER_SECONDS)
                for event in events:
                    self._theirs.send(event)
                heard += len(events)
                self._ending = ending if not events else None  # asked once more: nothing follows the last event
        except RayError as error:
            self._ending = self._ending or self._mourn(error)
        except (BrokenPipeError, OSError):
            self._ending = self._ending or Ending("ended with its supervisor", "")
        finally:
            self._over.set()
            self._theirs.close()

    def _speak(self) -> None:
        """Delivers messages one after the other, each until it has arrived."""
        number = 0
        while not self._running.wait(1.0):
            if self._over.is_set():
                return
        while (message := self._outbox.get()) is not None:
            number += 1
            try:
                self._answer(lambda n=number, m=message: self._actor.deliver.remote(n, m), None)  # it may fetch a model
            except RayError:
                return  # `_hear` meets the same and says why

    def _answer(self, question: Any, seconds: float | None) -> Any:
        """What the actor answers, asked again while the way to it is broken. Raises RayError once it or its machine is gone."""
        while True:
            try:
                return ray.get(question(), timeout=seconds)
            except (ActorUnavailableError, GetTimeoutError):
                if self.closed or not self._machine_lives():
                    raise
                time.sleep(_RETRY_SECONDS)

    def _machine_lives(self) -> bool:
        return self._node is None or any(node["NodeID"] == self._node for node in _nodes())

    def _mourn(self, error: RayError) -> Ending:
        """Why an actor answers no more: its machine is gone, or it alone."""
        deadline = time.monotonic() + _BURIAL_SECONDS
        while self.cause is None and not self.closed and time.monotonic() < deadline:
            if not self._machine_lives():
                self.lost = True
                return Ending(f"lost with its machine {self.place}", "")
            if getattr(error, "actor_init_failed", False):
                return Ending("never started", str(error))
            time.sleep(_RETRY_SECONDS)
        return Ending(f"ended with its Ray actor: {_first_line(error)}", str(error))
