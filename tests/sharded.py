"""Ranks of one group as processes that tests start: each runs a list of cases with engines of its own over one link.

`run_ranks(count, cases, folder)` starts them and returns, per rank, what each case gave. A case is a dict: name, model (folder), jobs
(fields of enginekit.make_job, with index and prompt), and any of fsdp (components), modes, batch_size, dtype, cfg_parallel, windows,
threads, raises ({rank, job, what}) and memory ({rank, bytes}).
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


@dataclass
class Given:
    """One case on one rank."""

    floats: dict[str, Any] = field(default_factory=dict)  # job key -> float array
    events: list[Any] = field(default_factory=list)
    error: str | None = None
    held: dict[str, Any] = field(default_factory=dict)  # component -> Shards
    modes: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # component -> calls of its forward
    extra: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if type(event).__name__ == kind]


def run_ranks(count: int, cases: list[dict[str, Any]], folder: Path, *, seconds: float = 600) -> list[dict[str, Given]]:
    """What every rank made of every case, by name. Fails with the ranks' last words where one of them does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(folder), str(rank), str(count)], env=environment,
            stdout=(folder / f"out-{rank}").open("w"), stderr=subprocess.STDOUT,
        )
        for rank in range(count)
    ]
    deadline = time.monotonic() + seconds
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    words = "\n".join((folder / f"out-{rank}").read_text()[-3000:] for rank in range(count))
    assert all(rank.returncode == 0 for rank in ranks), words
    return [pickle.loads((folder / f"given-{rank}").read_bytes()) for rank in range(count)]


def main(folder: Path, rank: int, count: int) -> None:
    import torch

    from batchgen.execute import engine
    from batchgen.execute.group import RankGroup
    from batchgen.execute.settings import GroupPlace

    torch.set_num_threads(1)
    device = os.environ.get("RANK_DEVICE", "cpu")
    devices = tuple(f"cuda:{number}" if device == "cuda" else "cpu" for number in range(count))
    place = GroupPlace(rank, devices, str(folder / "store"), cfg_parallel=count % 2 == 0)
    link = RankGroup(place, torch.device(devices[rank]))
    engine.join = lambda place, device: link  # one meeting for all cases
    cases = json.loads((folder / "cases.json").read_text())
    given = {case["name"]: run_case(case, link, folder) for case in cases}
    (folder / f"given-{rank}").write_bytes(pickle.dumps(given))
    os._exit(0)


def run_case(case: dict[str, Any], link: Any, folder: Path) -> Given:
    import contextlib

    import numpy as np
    import torch

    from batchgen.execute.memory import LiveLimit
    from batchgen.execute.settings import Window
    from enginekit import Ran, engine_for, make_job, make_plan

    link.cfg_parallel = bool(case.get("cfg_parallel"))
    model = Path(case["model"])
    modes = {**case.get("modes", {}), **dict.fromkeys(case.get("fsdp", ["transformer"]), "fsdp")}
    plan = make_plan(model, modes=modes, batch_size=case.get("batch_size"))
    given, ran = Given(), Ran()
    made = engine_for(
        model, folder / case["name"], ran, plan=plan, dtype=case.get("dtype", "float32"), device=link.place.devices[link.rank],
        group=link.place, emit=given.events.append,
    )
    take = made.products.take

    def keep(row: Any, product: Any, *args: Any, **kwargs: Any) -> None:
        given.floats[row.job.key] = np.array(product, copy=True)
        take(row, product, *args, **kwargs)

    made.products.take = keep
    jobs = tuple(make_job(**fields) for fields in case["jobs"])
    fault, memory = case.get("raises"), case.get("memory")
    if fault is not None and fault["rank"] == link.rank:
        _misbehave(made, fault, jobs)
    limit = LiveLimit("cpu", memory["bytes"]) if memory is not None and memory["rank"] == link.rank else contextlib.nullcontext()
    try:
        with limit:
            size = -(-len(jobs) // case.get("windows", 1))
            for number, start in enumerate(range(0, len(jobs), size)):
                made.run_window(Window(number, jobs[start : start + size]))
            made.products.finish()
    except Exception as error:  # noqa: BLE001 the test judges it
        given.error = f"{type(error).__name__}: {error}"
    given.held = dict(made.components.shards)
    given.modes = {name: made.residency.mode(name) for name in made.components.modules}
    for event in given.of("StageBatchDone"):
        for name, calls, _ in event.compute:
            given.calls[name] = given.calls.get(name, 0) + calls
    dtypes = {name: {str(weight.dtype) for weight in module.parameters()} for name, module in made.components.modules.items()}
    given.extra["dtypes"] = dtypes
    torch.manual_seed(0)
    return given


def _misbehave(engine: Any, fault: dict[str, Any], jobs: Any) -> None:
    """This rank alone fails in the middle of the denoiser whenever the named job is in the batch; its seeds tell."""
    import torch

    seed = jobs[fault["job"]].seed
    noise = engine._noise

    def watch(batch: Any) -> Any:
        engine.fault_now = any(row.job.seed == seed for row in batch)
        return noise(batch)

    engine._noise = watch
    engine.fault_now = False
    load = engine.components._load

    def loaded(name: str) -> None:
        load(name)
        if name != "transformer":
            return
        from batchgen.execute.streaming import find_blocks

        def hook(module: Any, args: Any, output: Any) -> None:
            if engine.fault_now:
                if fault["what"] == "oom":
                    raise torch.OutOfMemoryError("CUDA out of memory, on this rank alone")
                raise ValueError("this rank alone")

        find_blocks(engine.components.modules[name])[0][1].register_forward_hook(hook)

    engine.components._load = loaded


if __name__ == "__main__":
    import sharded  # under its own name, so that what is pickled can be read by who started it

    sharded.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
