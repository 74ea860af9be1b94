"""Memory of the host as this process may use it: the machine's, or less where a control group limits it."""

from __future__ import annotations

import os
from pathlib import Path

RESERVE_BYTES = 2 * 2**30  # left to the supervisor, the libraries and the rest of the machine
_UNLIMITED = 2**60  # cgroup v1 writes a huge number where there is no limit


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, available) bytes. Control groups count (v1 and v2); `root` is there for tests. Raises OSError where nothing is known."""
    total, available = _machine_memory(root)
    for limit, used in _group_limits(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return total, available


def host_share(stated_bytes: int | None, sharing: int, *, available_bytes: int | None = None) -> int | None:
    """Host memory for each of the processes that share it: of what the user stated or what there is, whichever is less.

    None: the only one finds out by itself. Settled once, before any of them has taken its own: each would find less than the one before.
    """
    if sharing <= 1:
        return stated_bytes
    there = max(0, (host_memory()[1] if available_bytes is None else available_bytes) - RESERVE_BYTES)
    return (there if stated_bytes is None else min(stated_bytes, there)) // sharing


def _machine_memory(root: Path) -> tuple[int, int]:
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        sizes = {name: int(value.split()[0]) * 1024 for name, value in fields.items() if value.split()[-1:] == ["kB"]}
        return sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # macOS tells free pages only, which leaves out what it would give back at once; three quarters is its own working limit.
    return total, total * 3 // 4


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used without reclaimable file pages) of every control group this process is in, from its own up to the top."""
    group = _own_group(root)
    found = []
    for base, limit_name, used_name in (
        (root / "sys/fs/cgroup", "memory.max", "memory.current"),
        (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for place in (base / part for part in _ancestry(group)):
            limit, used = _number(place / limit_name), _number(place / used_name)
            if limit is not None and used is not None and limit < _UNLIMITED:
                found.append((limit, max(used - _reclaimable(place / "memory.stat"), 0)))
    return found


def _own_group(root: Path) -> str:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        _hierarchy, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            return path.strip("/")
    return ""


def _ancestry(group: str) -> list[str]:
    parts = [part for part in group.split("/") if part and part != ".."]
    return ["/".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reclaimable(stat: Path) -> int:
    try:
        fields = dict(line.split(" ", 1) for line in stat.read_text(encoding="ascii").splitlines())
        return int(fields.get("inactive_file", fields.get("total_inactive_file", "0")))
    except (OSError, ValueError):
        return 0
