"""What memory there is and what is used: the host's budget, the device's figures, and a limit that can be set on any device.

Knows nothing of components or placements.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchgen.units import GIB, KIB, MIB, size_text

HOST_RESERVE_BYTES = 2 * GIB  # left to Python, the libraries, the decoder's pictures and the rest of the machine
# Distributions set `ulimit -l` to 64 KiB ... 8 MiB by default, which CUDA's driver does not count its pinned pages against;
# a larger finite value was set by somebody on purpose.
DELIBERATE_PIN_LIMIT_BYTES = 64 * MIB

_ON_HOST: ContextVar[bool] = ContextVar("batchgen_host_memory", default=False)


@contextmanager
def host_memory() -> Iterator[None]:
    """Tensors made inside are the host's, also where the execution device is the CPU itself: no meter counts them."""
    token = _ON_HOST.set(True)
    try:
        yield
    finally:
        _ON_HOST.reset(token)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory of its own (on the CPU too, so that dropping the original frees the device)."""
    with host_memory():
        return tensor.detach().to("cpu", copy=True)


class LiveStorages(TorchDispatchMode):
    """Counts the storages alive on one device: those made under it, or first seen under it outside `host_memory`.

    `limit_bytes` makes it a limit: an operation whose result would exceed it raises `torch.OutOfMemoryError`, on any device,
    the CPU and fake ones too. `live` now and `peak` at most, in bytes.
    """

    def __init__(self, device: torch.device | str = "cpu", *, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self.live = 0
        self.peak = 0
        self.refused = 0  # how often the limit raised
        self._sizes: dict[int, int] = {}
        self._host: set[int] = set()

    def reset_peak(self) -> None:
        self.peak = self.live

    def _see(self, tensor: torch.Tensor, func: object) -> None:
        if tensor.device != self.device or getattr(tensor, "holds_no_bytes", False):
            return
        storage = tensor.untyped_storage()
        key, size = int(storage._cdata), storage.nbytes()
        if key in self._sizes or key in self._host:
            return
        if _ON_HOST.get():
            self._host.add(key)
            weakref.finalize(storage, self._host.discard, key)
            return
        if self.limit_bytes is not None and self.live + size > self.limit_bytes:
            self.refused += 1
            raise torch.OutOfMemoryError(
                f"tried to allocate {size_text(size)} for {func}: {size_text(self.live)} of {size_text(self.limit_bytes)} are in use"
            )
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, func)
        return out

    def __enter__(self) -> LiveStorages:
        super().__enter__()
        _METERS.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _METERS.remove(self)
        super().__exit__(*raised)


_METERS: list[LiveStorages] = []  # entered now; what `DeviceMemory` asks where the device keeps no count itself


def is_metered(device: torch.device) -> bool:
    """Whether a meter that was entered counts this device's storages."""
    return any(meter.device == device for meter in _METERS)


class LiveLimit(LiveStorages):
    """A memory limit on any device: `with LiveLimit("cpu", 20 * MIB): ...`."""

    def __init__(self, device: torch.device | str, limit_bytes: int) -> None:
        super().__init__(device, limit_bytes=limit_bytes)


class DeviceMemory:
    """Allocated and peak bytes of the execution device: the allocator's on CUDA, an entered meter's elsewhere, else 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _meter(self) -> LiveStorages | None:
        return next((meter for meter in reversed(_METERS) if meter.device == self.device), None)

    @property
    def _real_cuda(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_available()

    def allocated(self) -> int:
        if self._real_cuda:
            return int(torch.cuda.memory_allocated(self.device))
        meter = self._meter()
        return meter.live if meter else 0

    def peak(self) -> int:
        """Most bytes allocated since `reset_peak`."""
        if self._real_cuda:
            return int(torch.cuda.max_memory_allocated(self.device))
        meter = self._meter()
        return meter.peak if meter else 0

    def reset_peak(self) -> None:
        if self._real_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif meter := self._meter():
            meter.reset_peak()

    def free(self) -> int | None:
        """Bytes a new tensor could still take; None where nobody knows. What the allocator caches counts as free."""
        if self._real_cuda:
            free, _ = torch.cuda.mem_get_info(self.device)
            return int(free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device))
        meter = self._meter()
        return None if meter is None or meter.limit_bytes is None else meter.limit_bytes - meter.live

    def release_cached(self) -> None:
        """Give blocks that nothing uses back to the driver."""
        if self._real_cuda:
            torch.cuda.empty_cache()


def rss_bytes() -> int:
    """Resident bytes of this process now; its highest mark where the system tells no more (macOS)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * KIB


def trim_allocator() -> None:
    """Hand freed pages back to the system: glibc keeps them, and a night of moves in and out grows without it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _number(path: Path) -> int | None:
    """A cgroup file's number; None for `max`, for a missing file and for v1's "no limit" (a huge number)."""
    try:
        value = int(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return None
    return None if value >= 2**60 else value


def _stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def cgroup_headroom(root: Path = Path("/")) -> int | None:
    """Bytes until the tightest memory limit of this process's cgroup chain, v1 and v2; None without a limit.

    File pages the kernel can drop (`inactive_file`) do not count as used. `root` stands before /proc and /sys.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = base / path.strip("/")
        # in a container the path may be the host's: then the mount itself is our own group
        for folder in (here, *here.parents) if here.is_dir() else (base,):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None:
                rooms.append(max(0, limit - (used or 0) + _stat(folder / "memory.stat", names[2])))
            if folder == base:
                break
    return min(rooms, default=None)


def mem_available(root: Path = Path("/")) -> int | None:
    """`MemAvailable` of /proc/meminfo in bytes."""
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KIB
    except (OSError, ValueError, IndexError):
        pass
    return None


def pin_limit() -> int | None:
    """`ulimit -l` in bytes where somebody set one on purpose (see DELIBERATE_PIN_LIMIT_BYTES), else None."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return soft if soft != resource.RLIM_INFINITY and soft >= DELIBERATE_PIN_LIMIT_BYTES else None


@dataclass(slots=True)
class HostBudget:
    """Host memory that a run may take: for copies of weights, pinned or not, and for what passes between stages.

    `take` counts; it allocates nothing. Weights that lie in a mapped file are not counted: the system can drop those pages.
    """

    limit_bytes: int
    pin_limit_bytes: int | None = None
    taken_bytes: int = 0
    pinned_bytes: int = 0
    why: str = ""

    @classmethod
    def find(cls, stated_bytes: int | None = None, *, root: Path = Path("/"), reserve_bytes: int = HOST_RESERVE_BYTES) -> HostBudget:
        """The least of what the user stated, MemAvailable and the cgroup chain's headroom, the latter two less a reserve."""
        found = {"MemAvailable": mem_available(root), "the cgroup limit": cgroup_headroom(root)}
        limits = {name: max(0, value - reserve_bytes) for name, value in found.items() if value is not None}
        if stated_bytes is not None:
            limits["--host-memory"] = stated_bytes
        if not limits:
            return cls(4 * GIB, pin_limit(), why="the system tells nothing: 4 GiB assumed")
        name = min(limits, key=lambda key: limits[key])
        return cls(limits[name], pin_limit(), why=f"{size_text(limits[name])}, by {name}")

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.taken_bytes)

    def take(self, size_bytes: int, *, pinned: bool = False) -> bool:
        """Count `size_bytes` as taken if they fit; False, and nothing counted, if not."""
        if size_bytes > self.limit_bytes - self.taken_bytes:
            return False
        if pinned and self.pin_limit_bytes is not None and self.pinned_bytes + size_bytes > self.pin_limit_bytes:
            return False
        self.taken_bytes += size_bytes
        self.pinned_bytes += size_bytes if pinned else 0
        return True

    def give_back(self, size_bytes: int, *, pinned: bool = False) -> None:
        self.taken_bytes -= size_bytes
        self.pinned_bytes -= size_bytes if pinned else 0


class HostBuffer:
    """A flat byte buffer in host memory, pinned where asked and possible. Counted in the budget until `free`.

    Pinned by registering ordinary pages: the caching pinned allocator rounds sizes up to a power of two, which for weights
    can double what they take.
    """

    def __init__(self, size_bytes: int, *, pinned: bool, budget: HostBudget) -> None:
        with host_memory(), torch.inference_mode(False):
            # pages of its own: they can be registered whatever lies beside them, and go back to the system at once
            private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
            pages = mmap.mmap(-1, max(1, size_bytes), **private)
            self.bytes = torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes) if size_bytes else torch.empty(0, dtype=torch.uint8)
        self._budget = budget
        self.pinned = pinned and self._register()

    @classmethod
    def of(cls, size_bytes: int, *, pinned: bool, budget: HostBudget) -> HostBuffer | None:
        """None when the budget does not allow it. Asked for pinned memory, it falls back to ordinary pages."""
        if pinned and budget.take(size_bytes, pinned=True):
            made = cls(size_bytes, pinned=True, budget=budget)
            if not made.pinned:
                budget.pinned_bytes -= size_bytes
            return made
        return cls(size_bytes, pinned=False, budget=budget) if budget.take(size_bytes) else None

    def _register(self) -> bool:
        if self.bytes.numel() == 0:
            return False
        if int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)) == 0:
            return True
        # the refusal stays behind as CUDA's "last error" and would be blamed on the next kernel: let a harmless one take it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
        return False

    def free(self) -> None:
        if self.pinned:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        self._budget.give_back(self.bytes.numel(), pinned=self.pinned)
        self.pinned = False
        self.bytes = self.bytes[:0]
