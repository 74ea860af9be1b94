"""Ranks of one group as processes that tests start once for many cases: each rank runs the list with engines of its own over one link.

`run_ranks(count, cases, folder)` returns, per rank, what each case gave, by its name. A case is a dict with "name" and "kind":
  run      model, jobs (fields of enginekit.make_job), and any of fsdp (components), modes, batch_size, dtype, cfg_parallel, windows,
           fault ({rank, what, job}: see `Fault`)
  load     model, component, dtype: the component loaded in parts, gathered, and held against the ordinary loader's
  modules  small modules of shapes that are hard to shard: see `sharded_modules`
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


@dataclass
class Given:
    """One case on one rank."""

    floats: dict[str, Any] = field(default_factory=dict)  # job key -> float array as decoded
    events: list[Any] = field(default_factory=list)
    error: str | None = None
    shards: dict[str, Any] = field(default_factory=dict)  # component -> Shards
    modes: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # component -> calls of it
    settled: list[tuple[str, int]] = field(default_factory=list)  # what stages gave on this rank before the ranks compared: fingerprints
    found: dict[str, Any] = field(default_factory=dict)  # whatever else a kind has to say

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if type(event).__name__ == kind]


def run_ranks(count: int, cases: list[dict[str, Any]], folder: Path, *, device: str = "cpu", seconds: float = 600) -> list[dict[str, Given]]:
    """Fails with the ranks' last words where one of them does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ranks = []
    for rank in range(count):
        with (folder / f"out-{rank}").open("w") as out:
            command = [sys.executable, __file__, str(folder), str(rank), str(count), device]
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + seconds
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    words = "\n".join((folder / f"out-{rank}").read_text()[-3000:] for rank in range(count))
    assert all(process.returncode == 0 for process in ranks), words
    return [pickle.loads((folder / f"given-{rank}").read_bytes()) for rank in range(count)]


# -- in the ranks -------------------------------------------------------------------------------------------------------


def main(folder: Path, rank: int, count: int, device: str) -> None:
    import torch

    from batchgen.execute import engine
    from batchgen.execute.group import RankGroup
    from batchgen.execute.load import quiet_libraries
    from batchgen.execute.settings import GroupPlace

    torch.set_num_threads(1)
    quiet_libraries()
    devices = tuple(f"cuda:{number}" if device == "cuda" else "cpu" for number in range(count))
    link = RankGroup(GroupPlace(rank, devices, str(folder / "store"), cfg_parallel=count % 2 == 0), torch.device(devices[rank]))
    engine.join = lambda place, device: link  # type: ignore[assignment]  one meeting for all cases
    kinds: dict[str, Callable[..., Given]] = {"run": run_case, "load": load_case, "modules": modules_case}
    cases = json.loads((folder / "cases.json").read_text())
    given = {case["name"]: kinds[case.get("kind", "run")](case, link, folder) for case in cases}
    (folder / f"given-{rank}").write_bytes(pickle.dumps(given))
    os._exit(0)


def run_case(case: dict[str, Any], link: Any, folder: Path) -> Given:
    import numpy as np

    from batchgen.execute.fingerprints import fingerprint
    from batchgen.execute.settings import Window
    from enginekit import Ran, engine_for, make_job, make_plan

    link.cfg_parallel = bool(case.get("cfg_parallel"))
    model, given = Path(case["model"]), Given()
    modes = {**case.get("modes", {}), **dict.fromkeys(case.get("fsdp", ["transformer"]), "fsdp")}
    made = engine_for(
        model, folder / case["name"], Ran(), plan=make_plan(model, modes=modes, batch_size=case.get("batch_size")),
        dtype=case.get("dtype", "float32"), device=link.place.devices[link.rank], group=link.place, emit=given.events.append,
    )
    take, settled = made.products.take, link.settled

    def keep(row: Any, product: Any, *args: Any, **kwargs: Any) -> None:
        given.floats[row.job.key] = np.array(product, copy=True)
        take(row, product, *args, **kwargs)

    def look(what: str, values: Any) -> Any:
        given.settled.append((what, fingerprint(values)))
        return settled(what, values)

    made.products.take, link.settled = keep, look  # type: ignore[method-assign]
    jobs = tuple(make_job(**fields) for fields in case["jobs"])
    if case.get("fault", {}).get("rank") == link.rank:
        jobs = Fault(made, case["fault"], jobs).jobs
    size = -(-len(jobs) // case.get("windows", 1))
    try:
        for number, start in enumerate(range(0, len(jobs), size)):
            made.run_window(Window(number, jobs[start : start + size]))
        made.products.finish()
    except Exception as error:  # noqa: BLE001 the test judges it
        given.error = f"{type(error).__name__}: {error}"
    finally:
        link.settled = settled
    given.shards = dict(made.components.shards)
    given.modes = {name: made.residency.mode(name) for name in made.components.modules}
    for event in given.of("StageBatchDone"):
        for name, calls, _ in event.compute:
            given.calls[name] = given.calls.get(name, 0) + calls
    dtypes = {name: sorted({str(weight.dtype) for weight in part.parameters()}) for name, part in made.components.modules.items()}
    given.found = {"dtypes": dtypes, "leftovers": leftovers(made.components.modules)}
    return given


def leftovers(modules: dict[str, Any]) -> int:
    """What torch still notes of past forwards, and weights that are still gathered."""
    from sharded_modules import groups_of

    left = 0
    for module in modules.values():
        if hasattr(module, "_get_fsdp_state"):
            left += len(getattr(module._get_fsdp_state()._comm_ctx, "post_forward_order", ()))  # none before its first call
            left += sum(not group.is_sharded for part in module.modules() for group in groups_of(part))
    return left


class Fault:
    """What one rank alone does. what: "raise" or "oom" in the middle of the denoiser while the job of index `job` is in the batch,
    "seed": its row has another seed than on the other ranks, "load": the weights do not fit when they are loaded."""

    def __init__(self, engine: Any, fault: dict[str, Any], jobs: tuple[Any, ...]) -> None:
        from dataclasses import replace

        self.jobs, self._now = jobs, False
        job = jobs[fault.get("job", 0)]
        if fault["what"] == "seed":
            self.jobs = tuple(replace(each, seed=each.seed + 1) if each is job else each for each in jobs)
            return
        self._what, self._seed, self._engine = fault["what"], job.seed, engine
        self._most = fault.get("most", 1)  # rows that fit, where memory runs out
        noise, watch = engine._noise, engine.components.meter.watch

        def drawn(batch: Any) -> Any:
            fits = self._what == "oom" and len(batch) <= self._most
            self._now = any(row.job.seed == self._seed for row in batch) and not fits
            return noise(batch)

        def loaded(name: str, module: Any) -> None:
            watch(name, module)
            if name == "transformer":
                self._watch(module)

        engine._noise, engine.components.meter.watch = drawn, loaded

    def _watch(self, module: Any) -> None:
        import torch

        from batchgen.execute.streaming import find_blocks

        def after(block: Any, args: Any, output: Any) -> None:
            if self._now:
                raise torch.OutOfMemoryError("CUDA out of memory") if self._what == "oom" else ValueError("this rank alone")

        find_blocks(module)[0][1].register_forward_hook(after)


def load_case(case: dict[str, Any], link: Any, folder: Path) -> Given:
    """Differences of weights, dtypes and buffers from the ordinary loader's."""
    import torch

    from batchgen.execute.load import ModelFolder
    from batchgen.execute.shard_loading import load_sharded

    model, name, dtype = ModelFolder.read(case["model"]), case["component"], getattr(torch, case["dtype"])
    module, shards = load_sharded(model, name, dtype, link)
    whole = model.load_model(name, dtype)
    ours = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    theirs = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers(remove_duplicate=False))
    wrong = sorted(ours.keys() ^ theirs.keys())
    for key, value in theirs.items():
        mine = ours[key].full_tensor() if hasattr(ours[key], "full_tensor") else ours[key]
        if mine.dtype != value.dtype or not torch.equal(mine.detach().cpu(), value.detach()):
            wrong.append(key)
    given = Given(shards={name: shards})
    given.found = {"wrong": wrong, "cut": sum(hasattr(value, "full_tensor") for value in ours.values()), "loaded_bytes": sum(
        value.nbytes for value in {id(value): value for value in theirs.values()}.values())}
    return given


def modules_case(case: dict[str, Any], link: Any, folder: Path) -> Given:
    import sharded_modules

    return Given(found=sharded_modules.differences(link))


if __name__ == "__main__":
    import sharded  # under its own name, so that what is pickled can be read by who started it

    sharded.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
