"""The host's budget from what the system says, and the limit that tests can set on any device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.execute.memory import (
    DeviceMemory,
    HostBudget,
    HostBuffer,
    LiveLimit,
    LiveStorages,
    cgroup_headroom,
    host_memory,
    mem_available,
    rss_bytes,
    to_host,
    trim_allocator,
)

GIB = 2**30


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
HEADROOMS = {
    "v2: the limit less what is used": (
        {"proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.max": "1000\n", f"{V2}/job/memory.current": "300\n"}, 700),
    "v2: file pages that can go do not count": (
        {"proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.max": "1000\n", f"{V2}/job/memory.current": "900\n",
         f"{V2}/job/memory.stat": "anon 300\ninactive_file 500\n"}, 600),
    "v2: the tightest of the chain": (
        {"proc/self/cgroup": "0::/slice/job\n", f"{V2}/slice/job/memory.max": "max\n", f"{V2}/slice/memory.max": "500\n",
         f"{V2}/slice/memory.current": "100\n"}, 400),
    "v2: inside a container the mount is the group": (
        {"proc/self/cgroup": "0::/docker/abc\n", f"{V2}/memory.max": "800\n", f"{V2}/memory.current": "0\n"}, 800),
    "v1": (
        {"proc/self/cgroup": "5:cpu:/x\n9:memory:/job\n", f"{V1}/job/memory.limit_in_bytes": "1000\n",
         f"{V1}/job/memory.usage_in_bytes": "400\n"}, 600),
    "v1: the huge number means no limit": (
        {"proc/self/cgroup": "9:memory:/\n", f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    "no limit": ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.stat": "anon 1\n"}, None),
    "no cgroups": ({}, None),
    "used beyond the limit": ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "100\n", f"{V2}/memory.current": "150\n"}, 0),
}


@pytest.mark.parametrize("case", HEADROOMS)
def test_cgroup_headroom(case: str, tmp_path: Path) -> None:
    files, want = HEADROOMS[case]
    assert cgroup_headroom(system(tmp_path, files)) == want


MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {32 * 2**20} kB\n"
BUDGETS = {
    "MemAvailable less the reserve": ({"proc/meminfo": MEMINFO}, None, 30 * GIB, "MemAvailable"),
    "a tighter cgroup": (
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{8 * GIB}\n", f"{V2}/memory.current": "0\n"},
        None, 6 * GIB, "cgroup"),
    "what the user states": ({"proc/meminfo": MEMINFO}, 5 * GIB, 5 * GIB, "--host-memory"),
    "never more than there is": ({"proc/meminfo": MEMINFO}, 100 * GIB, 30 * GIB, "MemAvailable"),
    "a silent system": ({}, None, 4 * GIB, "assumed"),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_the_budget_is_the_least_of_all(case: str, tmp_path: Path) -> None:
    files, stated, want, why = BUDGETS[case]
    budget = HostBudget.find(stated, root=system(tmp_path, files), reserve_bytes=2 * GIB)
    assert budget.limit_bytes == want
    assert why in budget.why


def test_this_machine_has_figures() -> None:
    assert rss_bytes() > 10**7
    assert HostBudget.find().limit_bytes > 0
    assert mem_available() is None or mem_available() > 0  # type: ignore[operator]
    trim_allocator()


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=20))
def test_never_over_budget(asked: list[tuple[int, bool]]) -> None:
    budget = HostBudget(1000, pin_limit_bytes=500)
    taken = [(size, pinned) for size, pinned in asked if budget.take(size, pinned=pinned)]
    assert budget.taken_bytes == sum(size for size, _ in taken) <= 1000
    assert budget.pinned_bytes == sum(size for size, pinned in taken if pinned) <= 500
    for size, pinned in taken:
        budget.give_back(size, pinned=pinned)
    assert (budget.taken_bytes, budget.pinned_bytes, budget.left_bytes) == (0, 0, 1000)


def test_a_host_buffer_counts_until_freed() -> None:
    budget = HostBudget(1000)
    buffer = HostBuffer.of(800, pinned=False, budget=budget)
    assert buffer is not None
    assert HostBuffer.of(300, pinned=False, budget=budget) is None
    assert buffer.bytes.data_ptr() % 4096 == 0, "on pages of its own"
    buffer.bytes.fill_(7)
    assert int(buffer.bytes.sum()) == 5600
    buffer.free()
    assert budget.left_bytes == 1000


def test_live_storages_follow_tensors() -> None:
    with LiveStorages("cpu") as meter:
        one = torch.zeros(100)
        view = one[10:]
        assert meter.live == 400
        two = one + 1
        assert (meter.live, meter.peak) == (800, 800)
        del one
        assert meter.live == 800, "the view holds the storage"
        del view, two
        assert (meter.live, meter.peak) == (0, 800)
        meter.reset_peak()
        assert meter.peak == 0


def test_host_memory_is_not_counted_even_on_the_cpu() -> None:
    with LiveStorages("cpu") as meter:
        with host_memory():
            kept = torch.zeros(100)
        copied = to_host(kept)
        assert kept.view(10, 10).sum().item() == 0
        assert meter.live < 100
        assert copied.data_ptr() != kept.data_ptr()


def test_the_limit_raises_as_a_device_would_and_recovers() -> None:
    with LiveLimit("cpu", 1000) as limit:
        kept = torch.zeros(200)
        with pytest.raises(torch.OutOfMemoryError, match="800 B of 1000 B are in use"):
            torch.zeros(100)
        assert (limit.live, limit.refused) == (800, 1)
        del kept
        torch.zeros(200)
    torch.zeros(1000)


def test_device_memory_asks_the_meter_where_the_device_keeps_no_count() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    assert (memory.allocated(), memory.free()) == (0, None)
    with LiveLimit("cpu", 1000):
        kept = torch.zeros(100)
        assert (memory.allocated(), memory.peak(), memory.free()) == (400, 400, 600)
        del kept
        memory.reset_peak()
        assert memory.peak() == 0
    assert memory.free() is None
