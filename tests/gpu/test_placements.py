"""Placements, streaming and recovery on a real CUDA device: run with --run-gpu. Tiny models; bytes, bits and event order, never seconds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import enginekit
from batchgen.events import ComponentMoved, DecisionMade, StageBatchDone
from batchgen.execute.load import ModelFolder
from batchgen.execute.memory import DeviceMemory, HostBudget, HostBuffer
from batchgen.execute.moving import Absent, AbsentWeightError, Weights
from batchgen.execute.residency import Residency
from batchgen.execute.streaming import BlockStream, CudaStreams
from batchgen.plan.traffic import layerwise_bytes

pytestmark = pytest.mark.gpu

MIB = 2**20
GIB = 2**30
CUDA = "cuda:0"
OFFLOAD, LAYERWISE = "component-offload", "layerwise-offload"


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x))) * 0.1


class Dit(nn.Module):
    def __init__(self, width: int = 1024, blocks: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return x


def made(width: int = 1024, blocks: int = 8) -> Dit:
    torch.manual_seed(0)
    return Dit(width, blocks).to(torch.bfloat16).eval().requires_grad_(False)


def jobs_of(count: int = 3, **fields: Any) -> list[Any]:
    return [enginekit.make_job(index, f"a red circle, number {index}", **({"steps": 2} | fields)) for index in range(count)]


def run(folder: Path, where: Path, jobs: list[Any], modes: dict[str, str], *, keep: int = 0, free: bool = False, **more: Any) -> enginekit.Ran:
    names = ModelFolder.read(folder).models
    placed = {} if free else {name: modes.get(name, modes.get("*", "resident")) for name in names}
    plan = enginekit.make_plan(folder, modes=placed, batch_size=more.pop("batch_size", 2), keep_bytes=tuple((name, keep) for name in names))
    return enginekit.run_jobs(folder, where, jobs, plan=plan, device=CUDA, **more)


PLACEMENTS: dict[str, tuple[dict[str, str], int]] = {
    "component-offload": ({"*": OFFLOAD}, 0),
    "layerwise, none kept": ({"*": LAYERWISE}, 0),
    "layerwise, some kept": ({"*": LAYERWISE}, 60_000),
    "mixed": ({"text_encoder": LAYERWISE, "transformer": OFFLOAD, "vae": "resident"}, 0),
}


@pytest.mark.parametrize("family", ["qwen_image", "z_image"])
def test_pictures_do_not_depend_on_the_placement(family: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder(family)
    want = run(folder, tmp_path / "resident", jobs_of(), {})
    assert not want.failed
    for number, (modes, keep) in enumerate(PLACEMENTS.values()):
        ran = run(folder, tmp_path / str(number), jobs_of(), modes, keep=keep)
        assert not ran.failed
        for key, pixels in want.floats.items():
            assert np.array_equal(ran.floats[key], pixels)


def test_batch_one_is_the_hand_called_pipeline(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder, jobs = tiny_folder("qwen_image"), jobs_of(2)
    ran = run(folder, tmp_path, jobs, {"*": LAYERWISE}, batch_size=1)
    pipe = enginekit.load_ordinary(folder).to(CUDA)
    for job in jobs:
        by_hand = enginekit.call_by_hand(pipe, job)
        assert np.abs(ran.floats[job.key] - by_hand).max() * 255 <= 1


@pytest.mark.parametrize("keep_blocks", [0, 2, 8])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_streaming_gives_the_same_bits_exact_bytes_and_a_bounded_peak(depth: int, keep_blocks: int) -> None:
    module, x = made(), torch.randn(256, 1024, dtype=torch.bfloat16, device=CUDA)
    resident = made().to(CUDA)
    want = resident(x)
    block = sum(parameter.nbytes for parameter in module.blocks[0].parameters())
    del resident
    gc.collect()
    torch.cuda.empty_cache()
    device = torch.device(CUDA)
    base = torch.cuda.memory_allocated()
    budget = HostBudget(8 * GIB)
    stream = BlockStream(
        "transformer", module, device, depth=depth, streams=CudaStreams(device), keep_bytes=keep_blocks * block,
        hold=lambda size: HostBuffer.of(size, pinned=True, budget=budget),
    )
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        stream.open()
        for _ in range(4):
            assert torch.equal(module(x), want)
        stream.close()
    torch.cuda.synchronize()
    outside = stream.outside.bytes_in
    assert stream.bytes_in == layerwise_bytes(outside, [block] * 8, kept=keep_blocks, depth=depth, visits=(4, 4))
    activations = 16 * x.nbytes
    assert torch.cuda.max_memory_allocated() - base <= outside + keep_blocks * block + stream.buffer_bytes + activations + 4 * MIB
    stream.release()
    assert budget.taken_bytes == 0
    assert not any(isinstance(parameter, Absent) for parameter in module.parameters())
    assert next(module.parameters()).device.type == "cpu"


def test_copies_run_beside_compute() -> None:
    """In the profiler's own timeline: most host-to-device copies of the later passes overlap a matrix product."""
    module, x = made(4096, 6), torch.randn(8192, 4096, dtype=torch.bfloat16, device=CUDA)
    device, budget = torch.device(CUDA), HostBudget(16 * GIB)
    stream = BlockStream(
        "transformer", module, device, depth=3, streams=CudaStreams(device), hold=lambda size: HostBuffer.of(size, pinned=True, budget=budget)
    )
    stream.open()
    module(x)
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiled:
        for _ in range(3):
            module(x)
        torch.cuda.synchronize()
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in profiled.events() if event.device_type.name == "CUDA"]
    copies = [(start, end) for name, start, end in spans if "Memcpy HtoD" in name and "Pinned" in name]
    products = [(start, end) for name, start, end in spans if "gemm" in name.lower() or "cutlass" in name.lower() or "nvjet" in name.lower()]
    assert len(copies) >= 9
    assert products
    beside = [copy for copy in copies if any(start < copy[1] and copy[0] < end for start, end in products)]
    assert len(beside) > len(copies) / 2
    stream.close()


def test_no_buffer_is_overwritten_while_its_block_computes() -> None:
    """Slow compute, quick copies, many passes: a race would change the result."""
    module, x = made(512, 12), torch.randn(65536, 512, dtype=torch.bfloat16, device=CUDA)
    want = made(512, 12).to(CUDA)(x)
    device, budget = torch.device(CUDA), HostBudget(4 * GIB)
    for depth in (2, 3, 4):
        stream = BlockStream(
            "transformer", module, device, depth=depth, streams=CudaStreams(device),
            hold=lambda size: HostBuffer.of(size, pinned=True, budget=budget),
        )
        for _ in range(3):
            stream.open()
            for _ in range(5):
                assert torch.equal(module(x), want)
            stream.close()
            torch.randn(64 * MIB, device=CUDA).sum()  # takes the buffers' memory over at once
        stream.release()


def test_a_forgotten_component_raises() -> None:
    module = made(64, 2)
    weights = Weights.of("transformer", module, torch.device(CUDA))
    weights.out()
    assert next(module.parameters()).device == torch.device(CUDA)
    with pytest.raises(AbsentWeightError, match="transformer"):
        module(torch.randn(1, 64, dtype=torch.bfloat16, device=CUDA))


def test_host_copies_are_pinned_exactly_and_given_back() -> None:
    budget = HostBudget(GIB)
    buffer = HostBuffer.of(300 * MIB + 7, pinned=True, budget=budget)
    assert buffer is not None
    assert buffer.pinned
    assert buffer.bytes.is_pinned()
    assert budget.taken_bytes == 300 * MIB + 7, "not rounded up to a power of two"
    buffer.free()
    assert budget.taken_bytes == 0


def test_offloaded_weights_leave_the_device_and_prefetch_brings_them_early() -> None:
    events: list[Any] = []
    device = torch.device(CUDA)
    residency = Residency(
        {"text_encoder": OFFLOAD, "transformer": OFFLOAD}, device, host_budget=HostBudget(4 * GIB), emit=events.append, fixed=["transformer"]
    )
    encoder, dit = made(1024, 2), made(1024, 4)
    x = torch.randn(64, 1024, dtype=torch.bfloat16, device=CUDA)
    want = made(1024, 4).to(CUDA)(x)
    residency.add("text_encoder", encoder)
    residency.add("transformer", dit)
    base = torch.cuda.memory_allocated()
    for _ in range(3):
        with residency.stage(["text_encoder"]):
            encoder(x)
            residency.prefetch_next(["transformer"])
            assert residency.is_in("transformer")
        with residency.stage(["transformer"]):
            assert torch.equal(dit(x), want)
        assert not residency.is_in("transformer")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == base
    size = sum(parameter.nbytes for parameter in dit.parameters())
    assert [event.bytes for event in events if isinstance(event, ComponentMoved) and event.component == "transformer" and event.bytes] == [size] * 3
    residency.release()


def test_the_ladder_on_a_small_device(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The allocator's own limit drives it: the batch is halved until it fits, and the pictures stay within a grey level."""
    folder, jobs = tiny_folder("qwen_image"), jobs_of(8, width=512, height=512)
    want = run(folder, tmp_path / "want", jobs[:1], {}, batch_size=1)
    by_one = torch.cuda.max_memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((by_one + 64 * MIB) / total)
    ran = run(folder, tmp_path / "ran", jobs, {}, batch_size=8)
    assert len(ran.done) == 8
    assert any(event.decision == "halve" for event in ran.of(DecisionMade))
    key = jobs[0].key
    assert np.abs(ran.floats[key] - want.floats[key]).max() * 255 <= 1


def test_memory_does_not_grow_over_many_windows(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for mode in (OFFLOAD, LAYERWISE):
        ran = run(tiny_folder("z_image"), tmp_path / mode, jobs_of(40), {"*": mode}, windows=20)
        assert len(ran.done) == 40
        allocated = [event.device_bytes for event in ran.events if type(event).__name__ == "MemorySample" and event.when == "decode"]
        assert allocated[-1] <= allocated[1]


def test_compute_is_timed_by_device_events_and_memory_is_the_allocators(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    ran = run(tiny_folder("z_image"), tmp_path, jobs_of(2), {})
    timed = [seconds for event in ran.of(StageBatchDone) for _, _, seconds in event.compute]
    assert timed
    assert all(seconds > 0 for seconds in timed)
    memory = DeviceMemory(torch.device(CUDA))
    assert memory.peak() >= memory.allocated() > 0
    assert (memory.free() or 0) > 0
