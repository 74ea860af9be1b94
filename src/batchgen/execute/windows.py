"""What is done inside a window: which rows share a batch, and where what passes between the stages is kept.

Pure of models: rows, keys, bytes and spool files only.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from batchgen.execute.guidance import JobGuidance
from batchgen.execute.memory import HostBudget
from batchgen.execute.stages import Item, value_bytes
from batchgen.jobs import Job, ShapeKey
from batchgen.plan.records import Plan

AUTO_BATCH = 8  # a small model on one CPU thread: within 5 % of the best of 1, 2, 4, 8 and 16 at 64 and 256 pixels
AUTO_PIXELS = AUTO_BATCH * 512 * 512  # pixels of all frames of a batch, where no plan says how many rows fit
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Row:
    """A job on its way through the stages."""

    job: Job
    guidance: JobGuidance
    values: dict[str, Any] = field(default_factory=dict)  # what earlier stages gave for it, on the host
    generator: torch.Tensor | None = None  # the state of its generator, where a stage has drawn from it
    batch: int = 0  # rows it was denoised with
    seconds: float = 0.0  # its share of the stages' time
    flags: tuple[str, ...] = ()
    spool: Path | None = None

    @property
    def shape(self) -> ShapeKey:
        return self.job.shape

    def generator_now(self) -> torch.Generator:
        """A CPU generator at the point where the row's last stage left it; from the job's seed where none has drawn."""
        made = torch.Generator("cpu")
        if self.generator is None:
            return made.manual_seed(self.job.seed)
        made.set_state(self.generator)
        return made


def group_rows(rows: Iterable[Row], *, mixes_guidance: bool, apart: bool = True) -> list[tuple[ShapeKey, list[Row]]]:
    """Rows that may share a batch, groups in the order of their first rows.

    Rows of different guidance share one where the guider allows it. `apart`: rows without a second branch stay apart from those
    with one, since each would pay for it.
    """
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        shape = replace(row.shape, guidance=None, true_cfg_scale=None) if mixes_guidance else row.shape
        # what cannot be joined must be the same object: rows that were made from the same picture
        whole = tuple(id(value) for value in row.values.values() if isinstance(value, (list, tuple, dict)))
        groups.setdefault((shape, apart and row.guidance.on, whole), []).append(row)
    return [(group[0].shape, group) for group in groups.values()]


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Runs of at most `size` items, in order, nearly equal: 9 by 8 gives 5 and 4, for a batch of one is as slow as one of two."""
    count = -(-len(items) // max(1, size))
    start = 0
    for index in range(count):
        length = -(-(len(items) - start) // (count - index))
        yield items[start : start + length]
        start += length


class BatchSizes:
    """How many rows a stage takes at once: what the user set, else what the plan says, else by the pixels of a row."""

    def __init__(self, plan: Plan) -> None:
        self._fixed = plan.batch_size
        self._planned = {(stage.name, stage.shape): stage.batch for stage in plan.stages}
        self._stage: dict[str, int] = {}
        for stage in plan.stages:
            self._stage[stage.name] = min(stage.batch, self._stage.get(stage.name, stage.batch))
        self.planned_stages = frozenset(self._stage)

    def of(self, stage: str, shape: ShapeKey | None, pixels: int | None) -> int:
        """`pixels`: width x height x frames of one row, None where the stage makes none."""
        if self._fixed is not None:
            return max(1, self._fixed)
        if shape is not None and (stage, shape.text) in self._planned:
            return self._planned[stage, shape.text]
        if stage in self._stage:
            return self._stage[stage]
        return AUTO_BATCH if not pixels else max(1, min(AUTO_BATCH, AUTO_PIXELS // pixels))


class EncodedCache:
    """Embeddings of texts already encoded, over the whole run, in host memory: the least recently used go first.

    A value is what one stage gave for one key. What the window at work needs is pinned to it by the rows that hold it.
    """

    def __init__(self, budget: HostBudget, share: float = 0.25) -> None:
        self.limit_bytes = int(budget.left_bytes * share)
        self.held_bytes = 0
        self._values: OrderedDict[Hashable, tuple[dict[str, Any], int]] = OrderedDict()
        self.tells_apart = False  # two texts that differ have been seen to give different embeddings

    def get(self, key: Hashable) -> dict[str, Any] | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Hashable, value: dict[str, Any]) -> None:
        size = value_bytes(list(value.values()))
        if key in self._values:
            self.held_bytes -= self._values.pop(key)[1]
        self._values[key] = (value, size)
        self.held_bytes += size
        while self.held_bytes > self.limit_bytes and len(self._values) > 1:
            _, (_, gone) = self._values.popitem(last=False)
            self.held_bytes -= gone


def spool_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes the rows' carried values to one safetensors file, so that a kill after this costs no denoising.

    Raises OSError as the disk does. A half-written file is found out by its header when it is read.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for row in rows:
        key = row.job.key
        described = {name: _describe(f"{key}/{name}", value, tensors) for name, value in row.values.items()}
        if row.generator is not None:
            tensors[f"{key}/generator state"] = row.generator
        plain[key] = {"values": described, "batch": row.batch, "seconds": row.seconds, "flags": row.flags}
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_suffix(".part")
    save_file(tensors, temp, metadata={"rows": json.dumps(plain)})
    temp.replace(path)


def _describe(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A carried value as JSON, its tensors put aside under `name`. Raises TypeError for what cannot be written down."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if isinstance(value, Item):
        return {"item": _describe(name, value.value, tensors)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"plain": value}
    if isinstance(value, (list, tuple)):
        return {"list": [_describe(f"{name}/{index}", element, tensors) for index, element in enumerate(value)]}
    raise TypeError(f"{name}: a {type(value).__name__} cannot be spooled")


def unspool(path: Path, wanted: Mapping[str, Row]) -> None:
    """Gives the rows (by job key) what the file holds for them. Raises OSError or ValueError for a lost or broken file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads(file.metadata()["rows"])
            for key, row in wanted.items():
                told = plain[key]
                row.values = {name: _restore(value, file.get_tensor) for name, value in told["values"].items()}
                row.batch, row.seconds, row.flags = told["batch"], told["seconds"], tuple(told["flags"])
                state = f"{key}/generator state"
                row.generator = file.get_tensor(state) if state in file.keys() else None  # noqa: SIM118  a file is no mapping
                row.spool = path
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _restore(value: Mapping[str, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    (kind, content), = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "item":
        return Item(_restore(content, tensor))
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "list":
        return [_restore(element, tensor) for element in content]
    return content
