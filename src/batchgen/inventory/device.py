"""The devices at hand, and devices that are only stated. One probe, without torch: NVML for CUDA, the platform's facts for the rest.

The worker confirms with torch before it loads anything: NVML sees every card of the machine, torch the ones of its process.
"""

from __future__ import annotations

import difflib
import math
import os
import platform as platform_module
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from batchgen.errors import UsageError
from batchgen.inventory.host import host_memory
from batchgen.inventory.records import DeviceFacts, Platform
from batchgen.units import GIB

PLATFORMS: tuple[Platform, ...] = ("cuda", "mps", "cpu")
# Of the NVIDIA driver on Linux: its control device, the one of WSL, and that of Jetson boards.
_DRIVER_MARKS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/proc/driver/nvidia/version")
# Metal's own advice for the share of unified memory that one process should use.
_MPS_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class _Card:
    """One entry of CUDA's enumeration. `slice_of`: the UUID of the card that a MIG slice is cut from."""

    name: str
    uuid: str
    total_bytes: int
    available_bytes: int
    slice_of: str | None = None


def probe(selected: Sequence[str] | None, *, platform: str | None = None) -> tuple[Platform, tuple[DeviceFacts, ...]]:
    """The platform and its selected devices (none named: all). Raises UsageError for a device or platform that is not there.

    `selected` takes torch's names (`cuda:0`, `mps`, `cpu`), plain indices and UUIDs, counted among the devices that
    CUDA_VISIBLE_DEVICES leaves. On the CPU the host's memory is shared out among the entries.
    """
    names = [part.strip() for text in selected or () for part in text.split(",") if part.strip()]
    wanted = _wanted_platform(names, platform)
    if wanted in (None, "cuda"):
        found = _visible(*_nvml_cards(os.environ), os.environ)
        if found:
            return "cuda", _select_cuda(found, [] if names == ["cuda"] else names)
        if wanted == "cuda":
            raise UsageError("no CUDA device can be used here: NVML finds none", option="--device" if names else "--platform",
                             hint="Use --device cpu; batchgen plan takes --gpu for a machine that is not here.")  # fmt: skip
    if wanted == "mps" or (wanted is None and _apple_silicon()):
        if not _apple_silicon():
            raise UsageError("mps needs a Mac with Apple silicon, and this is none", option="--device" if names else "--platform",
                             hint="Plan for one with --platform mps --device-memory TOTAL.")  # fmt: skip
        total, _free = host_memory()
        return "mps", (DeviceFacts("Apple GPU (shared memory)", "mps", total, round(total * _MPS_SHARE)),)
    total, available = host_memory()
    count = max(1, len(names))
    device = DeviceFacts(_processor_name(), "cpu", total // count, available // count)
    return "cpu", (device,) * count


def stated(specs: Sequence[str], platform: Platform) -> tuple[DeviceFacts, ...]:
    """Devices of `TOTAL[:AVAILABLE]` GiB, one an entry. Raises UsageError."""
    return tuple(_stated(text, platform, number) for number, text in enumerate(specs))


def _stated(text: str, platform: Platform, number: int) -> DeviceFacts:
    total_text, _colon, available_text = text.partition(":")
    total = _gib(total_text, text)
    available = _gib(available_text, text) if _colon else total
    if available > total:
        raise UsageError(f"--device-memory {text}: more is available than there is in all", option="--device-memory",
                         hint="Write TOTAL:AVAILABLE in GiB, like 24:22.5.")  # fmt: skip
    return DeviceFacts("stated device", torch_name(platform, number), round(total * GIB), round(available * GIB))


def _gib(text: str, whole: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size > 0):
        raise UsageError(f"--device-memory {whole}: {text!r} is not a size in GiB", option="--device-memory",
                         hint="Write TOTAL or TOTAL:AVAILABLE, like 24 or 24:22.5, once a device.")  # fmt: skip
    return size


def torch_name(platform: Platform, number: int) -> str:
    return f"cuda:{number}" if platform == "cuda" else platform


def check_platform(name: str) -> Platform:
    """Raises UsageError with the nearest platform."""
    if name not in PLATFORMS:
        near = difflib.get_close_matches(name.lower(), PLATFORMS, n=1, cutoff=0.5)
        question = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"--platform: there is no platform {name!r}.{question}", option="--platform",
                         hint=f"Platforms: {', '.join(PLATFORMS)}.")  # fmt: skip
    return name


def _wanted_platform(names: Sequence[str], platform: str | None) -> Platform | None:
    meant = {_platform_of(name) for name in names}
    if platform is not None:
        meant.add(check_platform(platform))
    if len(meant) > 1:
        raise UsageError(f"--device {','.join(names)}: devices of {', '.join(sorted(meant))} cannot work in one run", option="--device",
                         hint="Name devices of one platform.")  # fmt: skip
    return meant.pop() if meant else None


def _platform_of(name: str) -> Platform:
    if name in ("cpu", "mps"):
        return cast(Platform, name)
    if name == "cuda" or name.isdecimal() or name.startswith(("cuda:", "GPU-", "MIG-")):
        return "cuda"
    near = ["cuda"] if name.lower() in ("gpu", "nvidia") else difflib.get_close_matches(
        name.lower(), ("cuda:0", "cuda", "mps", "cpu"), n=1, cutoff=0.5)
    question = f" Did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"--device: {name!r} is no device.{question}", option="--device",
                     hint="Write cuda:0, cuda, an index, a GPU's UUID, mps or cpu; several with commas.")  # fmt: skip


def _select_cuda(visible: Sequence[_Card], names: Sequence[str]) -> tuple[DeviceFacts, ...]:
    """The named devices, in the order named. Raises UsageError."""
    facts = [
        DeviceFacts(card.name, f"cuda:{number}", card.total_bytes, card.available_bytes, uuid=card.uuid)
        for number, card in enumerate(visible)
    ]
    chosen: list[DeviceFacts] = []
    for name in names:
        index = name.removeprefix("cuda:")
        matches = [
            device for number, device in enumerate(facts)
            if (index.isdecimal() and int(index) == number) or (device.uuid or "").startswith(name)
        ]  # fmt: skip
        if len(matches) != 1:
            there = ", ".join(f"{device.torch_name} ({device.name}, {device.uuid})" for device in facts)
            nearest = difflib.get_close_matches(name, [device.torch_name for device in facts], n=1, cutoff=0.0)[0]
            raise UsageError(f"--device {name}: no such device. Did you mean {nearest!r}?", option="--device", hint=f"There are {there}.")
        if matches[0] in chosen:
            raise UsageError(f"--device {name}: {matches[0].torch_name} is named twice", option="--device", hint="Name each device once.")
        chosen.append(matches[0])
    return tuple(chosen or facts)


def _visible(cards: Sequence[_Card], slices: Sequence[_Card], environment: Mapping[str, str]) -> list[_Card]:
    """What CUDA would enumerate of cards and MIG slices, in its order.

    As CUDA reads CUDA_VISIBLE_DEVICES: indices, or UUIDs that may be cut short; the list ends at the first entry that names nothing,
    a repeated entry empties it, and one process sees one MIG slice at most (NVIDIA MIG User Guide, "CUDA Device Enumeration").
    """
    sliced = {part.slice_of for part in slices}
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        whole = [card for card in cards if card.uuid not in sliced]
        return whole or list(slices[:1])
    chosen: list[_Card] = []
    for entry in (part.strip() for part in text.split(",")):
        card = _entry(entry, cards, slices)
        if card is None:
            break
        if card in chosen:
            return []
        chosen.append(card)
    first_slice = next((card for card in chosen if card.slice_of is not None), None)
    return [first_slice] if first_slice is not None else chosen


def _entry(entry: str, cards: Sequence[_Card], slices: Sequence[_Card]) -> _Card | None:
    """The card or slice that one entry of CUDA_VISIBLE_DEVICES names; a card cut into slices stands for its first one."""
    if entry.startswith("MIG-"):
        found = [part for part in slices if part.uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        found = [card for card in cards if card.uuid.startswith(entry)]
    else:
        found = [cards[int(entry)]] if entry.isdecimal() and int(entry) < len(cards) else []
    if len(found) != 1:
        return None
    return next((part for part in slices if part.slice_of == found[0].uuid), found[0])


def _nvml_cards(environment: Mapping[str, str]) -> tuple[list[_Card], list[_Card]]:
    """(cards in CUDA's order, their MIG slices) as NVML sees them; nothing where there is no driver. Raises UsageError if it is broken."""
    if sys.platform == "linux" and not any(Path(mark).exists() for mark in _DRIVER_MARKS):
        return [], []
    import pynvml  # takes as long to import as everything else that a plan needs

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return [], []
    except pynvml.NVMLError as error:
        raise UsageError(f"the NVIDIA driver does not answer: {error}", option="--platform",
                         hint="nvidia-smi should say the same. To go on without it: --device cpu.") from error  # fmt: skip
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        handles = _cuda_order(pynvml, handles, environment)
        cards = [_card(pynvml, handle) for handle in handles]
        slices = [
            _card(pynvml, part, slice_of=card.uuid)
            for card, handle in zip(cards, handles, strict=True) for part in _slice_handles(pynvml, handle)
        ]  # fmt: skip
    except pynvml.NVMLError as error:
        raise UsageError(f"the NVIDIA driver does not tell its devices: {error}", option="--platform",
                         hint="nvidia-smi should say the same. To go on without them: --device cpu.") from error  # fmt: skip
    finally:
        pynvml.nvmlShutdown()
    return cards, slices


def _cuda_order(nvml: Any, handles: Sequence[Any], environment: Mapping[str, str]) -> list[Any]:
    """By PCI bus; without CUDA_DEVICE_ORDER=PCI_BUS_ID the faster card comes first (CUDA's own guess is not public: cores × clock)."""

    def bus(handle: Any) -> str:
        return _string(nvml.nvmlDeviceGetPciInfo(handle).busId).upper()

    def speed(handle: Any) -> int:
        try:
            return int(nvml.nvmlDeviceGetNumGpuCores(handle)) * int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        except nvml.NVMLError:
            return 0

    ordered = sorted(handles, key=bus)
    return ordered if environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else sorted(ordered, key=speed, reverse=True)


def _card(nvml: Any, handle: Any, *, slice_of: str | None = None) -> _Card:
    name, uuid = _string(nvml.nvmlDeviceGetName(handle)), _string(nvml.nvmlDeviceGetUUID(handle))
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, available = int(memory.total), int(memory.free)
    except nvml.NVMLError_NotSupported:
        # Boards whose GPU shares the host's memory have none of their own to tell.
        total, available = host_memory()
    return _Card(name, uuid, total, available, slice_of)


def _slice_handles(nvml: Any, handle: Any) -> list[Any]:
    """Handles of a card's MIG slices; none where MIG is off or unknown to the card."""
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return []
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return []
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError_NotFound:
            continue
    return found


def _string(text: Any) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _processor_name() -> str:
    """As the kernel names it; platform.processor() would start a process to ask."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return name or platform_module.machine() or "CPU"


def _apple_silicon() -> bool:
    return platform_module.system() == "Darwin" and platform_module.machine() == "arm64"
