"""The probe against a stubbed NVML: which devices a process sees, in CUDA's order, and what there is without a driver."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from batchgen.errors import UsageError
from batchgen.inventory import device
from batchgen.inventory.device import probe

GIB = 2**30
HOST = (64 * GIB, 50 * GIB)


@dataclass
class Slice:
    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    total: int = 20 * GIB
    free: int = 19 * GIB


@dataclass
class Gpu:
    uuid: str
    bus: str
    name: str = "NVIDIA GeForce RTX 4090"
    total: int = 24 * GIB
    free: int = 23 * GIB
    cores: int = 16384
    memory: bool = True  # tells its memory
    slices: list[Slice | None] = field(default_factory=list)  # None: a free place
    mig: bool = False


class Nvml:
    """The calls the probe may make; anything else fails. Errors are the real package's."""

    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_NotFound = pynvml.NVMLError_NotFound

    def __init__(self, gpus: list[Gpu], *, init_error: int | None = None) -> None:
        self.gpus, self.init_error, self.open = gpus, init_error, 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(busId=gpu.bus.encode())

    def nvmlDeviceGetName(self, gpu: Gpu | Slice) -> bytes:
        return gpu.name.encode()

    def nvmlDeviceGetUUID(self, gpu: Gpu | Slice) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu | Slice) -> Any:
        if isinstance(gpu, Gpu) and not gpu.memory:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=gpu.total, free=gpu.free, used=gpu.total - gpu.free)

    def nvmlDeviceGetNumGpuCores(self, gpu: Gpu) -> int:
        return gpu.cores

    def nvmlDeviceGetMaxClockInfo(self, gpu: Gpu, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        return 2500

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        if not gpu.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(gpu.mig), int(gpu.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return len(gpu.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Slice:
        part = gpu.slices[index]
        if part is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return part


BIG = Gpu("GPU-bbbb-big", "00000000:41:00.0", "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, cores=16896)
SMALL = Gpu("GPU-aaaa-small", "00000000:01:00.0", "NVIDIA GeForce RTX 3060", 12 * GIB, 11 * GIB, cores=3584)
TWIN = Gpu("GPU-cccc-twin", "00000000:81:00.0", "NVIDIA H100 80GB HBM3", 80 * GIB, 40 * GIB, cores=16896)
CUT = Gpu("GPU-dddd-cut", "00000000:C1:00.0", "NVIDIA A100-SXM4-40GB", 40 * GIB, 39 * GIB, cores=6912, mig=True,
          slices=[None, Slice("MIG-1111-one"), Slice("MIG-2222-two", free=5 * GIB)])  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stubbed driver in place and clears the environment; gives the stub."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_DRIVER_MARKS", ("/",))
    monkeypatch.setattr(device, "host_memory", lambda: HOST)

    def put(*gpus: Gpu, init_error: int | None = None, **environment: str) -> Nvml:
        stub = Nvml(list(gpus), init_error=init_error)
        monkeypatch.setitem(sys.modules, "pynvml", stub)  # type: ignore[arg-type]
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return stub

    return put


def uuids(selected: list[str] | None = None) -> list[str | None]:
    platform, found = probe(selected)
    assert platform == "cuda"
    assert [facts.torch_name for facts in found] == [facts.torch_name for facts in found if facts.torch_name.startswith("cuda:")]
    return [facts.uuid for facts in found]


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [
        (None, "PCI_BUS_ID", ["GPU-aaaa-small", "GPU-bbbb-big", "GPU-cccc-twin"]),
        (None, None, ["GPU-bbbb-big", "GPU-cccc-twin", "GPU-aaaa-small"]),
        (None, "FASTEST_FIRST", ["GPU-bbbb-big", "GPU-cccc-twin", "GPU-aaaa-small"]),
        ("1", "PCI_BUS_ID", ["GPU-bbbb-big"]),
        ("1", None, ["GPU-cccc-twin"]),
        ("2,0", "PCI_BUS_ID", ["GPU-cccc-twin", "GPU-aaaa-small"]),
        (" 2 , 0 ", "PCI_BUS_ID", ["GPU-cccc-twin", "GPU-aaaa-small"]),
        ("GPU-cccc-twin,GPU-aaaa-small", None, ["GPU-cccc-twin", "GPU-aaaa-small"]),
        ("GPU-cc", None, ["GPU-cccc-twin"]),
        ("0,7,1", "PCI_BUS_ID", ["GPU-aaaa-small"]),
        ("1,GPU-aaaa-small", "PCI_BUS_ID", ["GPU-bbbb-big", "GPU-aaaa-small"]),
    ],
    ids=["all by bus", "the fastest first", "the same by name", "index by bus", "index among the fastest", "in the order asked",
         "with spaces", "by UUID", "by the start of a UUID", "ends at the first unknown index", "index and UUID"],
)  # fmt: skip
def test_visible_devices_as_cuda_counts_them(machine: Any, visible: str | None, order: str | None, expected: list[str]) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    stub = machine(TWIN, SMALL, BIG, **{name: value for name, value in environment.items() if value is not None})
    assert uuids() == expected
    assert stub.open == 0, "NVML was left open"


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "GPU-zzzz", "0,0", "GPU-"])
def test_nothing_visible_is_the_cpu(machine: Any, visible: str) -> None:
    machine(BIG, TWIN, CUDA_VISIBLE_DEVICES=visible)
    platform, found = probe(None)
    assert platform == "cpu"
    assert (found[0].total_bytes, found[0].available_bytes) == HOST


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-bbbb-big"]),
        ("MIG-1111-one", ["MIG-1111-one"]),
        ("MIG-22", ["MIG-2222-two"]),
        ("MIG-2222-two,MIG-1111-one", ["MIG-2222-two"]),
        ("GPU-dddd-cut", ["MIG-1111-one"]),
        ("1", ["MIG-1111-one"]),
    ],
    ids=["whole cards first", "by UUID", "by the start of a UUID", "one slice a process", "a cut card is its first slice", "by index"],
)
def test_mig_slices(machine: Any, visible: str | None, expected: list[str]) -> None:
    machine(BIG, CUT, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert uuids() == expected


def test_a_slice_has_its_own_memory_and_name(machine: Any) -> None:
    machine(CUT, CUDA_VISIBLE_DEVICES="MIG-2222-two")
    _platform, (facts,) = probe(None)
    assert (facts.total_bytes, facts.available_bytes) == (20 * GIB, 5 * GIB)
    assert facts.name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"


def test_a_machine_of_cut_cards_alone_shows_the_first_slice(machine: Any) -> None:
    machine(CUT)
    assert uuids() == ["MIG-1111-one"]


def test_mig_switched_off_is_a_whole_card(machine: Any) -> None:
    machine(Gpu("GPU-eeee", "00000000:01:00.0", slices=[None], mig=False))
    assert uuids() == ["GPU-eeee"]


def test_memory_not_supported_is_the_host_s(machine: Any) -> None:
    machine(Gpu("GPU-spark", "00000000:01:00.0", "NVIDIA GB10", memory=False))
    platform, (facts,) = probe(None)
    assert platform == "cuda"
    assert (facts.total_bytes, facts.available_bytes) == HOST


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_is_the_cpu_with_the_host_s_memory(machine: Any, error: int) -> None:
    machine(init_error=error)
    platform, (facts,) = probe(None)
    assert (platform, facts.torch_name) == ("cpu", "cpu")
    assert (facts.total_bytes, facts.available_bytes) == HOST


def test_no_mark_of_a_driver_spares_the_import(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(BIG)
    monkeypatch.setattr(device, "_DRIVER_MARKS", ("/no/such/file",))
    monkeypatch.setattr(device.sys, "platform", "linux")
    assert probe(None)[0] == "cpu"


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN])
def test_a_broken_driver_is_an_error_not_a_cpu_run(machine: Any, error: int) -> None:
    machine(init_error=error)
    with pytest.raises(UsageError, match="driver") as caught:
        probe(None)
    assert "--device cpu" in str(caught.value)
    assert probe(None, platform="cpu")[0] == "cpu"


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        (["cuda"], ["GPU-bbbb-big", "GPU-cccc-twin"]), (["cuda:1"], ["GPU-cccc-twin"]), (["1", "cuda:0"], ["GPU-cccc-twin", "GPU-bbbb-big"]),
        (["cuda:1,cuda:0"], ["GPU-cccc-twin", "GPU-bbbb-big"]), (["GPU-cccc"], ["GPU-cccc-twin"]),
    ],
)  # fmt: skip
def test_selected_devices_keep_their_order_and_their_torch_names(machine: Any, selected: list[str], expected: list[str]) -> None:
    machine(BIG, TWIN)
    _platform, found = probe(selected)
    assert [facts.uuid for facts in found] == expected
    assert {facts.uuid: facts.torch_name for facts in found}.items() <= {"GPU-bbbb-big": "cuda:0", "GPU-cccc-twin": "cuda:1"}.items()


@pytest.mark.parametrize(
    ("selected", "platform", "words"),
    [
        (["cuda:5"], None, ["cuda:5", "'cuda:1'", "GPU-cccc-twin"]),
        (["cuda:0", "0"], None, ["twice"]),
        (["cuda:0", "cpu"], None, ["cpu", "cuda"]),
        (["cuda:0"], "cpu", ["cpu", "cuda"]),
        (["gpu0"], None, ["'gpu0'", "Did you mean"]),
        (["mps"], None, ["mps", "Apple"]),
        (None, "mps", ["mps", "Apple"]),
        (None, "cuba", ["'cuba'", "'cuda'"]),
        (["GPU-"], None, ["GPU-"]),
    ],
)
def test_a_device_that_is_not_there_is_refused(machine: Any, selected: list[str] | None, platform: str | None, words: list[str]) -> None:
    machine(BIG, TWIN)
    with pytest.raises(UsageError) as caught:
        probe(selected, platform=platform)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_cuda_without_a_card_is_refused_with_a_way_out(machine: Any) -> None:
    machine()
    with pytest.raises(UsageError, match="--gpu"):
        probe(None, platform="cuda")


def test_several_cpu_entries_share_the_host_s_memory(machine: Any) -> None:
    machine()
    _platform, found = probe(["cpu", "cpu"])
    assert [facts.total_bytes for facts in found] == [32 * GIB, 32 * GIB]


def test_apple_silicon_by_the_platform_s_facts(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(device.platform_module, "system", lambda: "Darwin")
    monkeypatch.setattr(device.platform_module, "machine", lambda: "arm64")
    platform, (facts,) = probe(None)
    assert (platform, facts.torch_name, facts.total_bytes, facts.available_bytes) == ("mps", "mps", 64 * GIB, 48 * GIB)
    assert probe(["cpu"])[0] == "cpu"


def test_an_intel_mac_is_a_cpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(device.platform_module, "system", lambda: "Darwin")
    monkeypatch.setattr(device.platform_module, "machine", lambda: "x86_64")
    assert probe(None)[0] == "cpu"


@pytest.mark.parametrize(
    ("specs", "expected"), [(["24"], [(24.0, 24.0)]), (["24:22.5", "80"], [(24.0, 22.5), (80.0, 80.0)]), (["45.3:45.3"], [(45.3, 45.3)])],
)  # fmt: skip
def test_stated_devices(specs: list[str], expected: list[tuple[float, float]]) -> None:
    found = device.stated(specs, "cuda")
    assert [(pytest.approx(facts.total_gb), pytest.approx(facts.available_gb)) for facts in found] == expected
    assert [facts.torch_name for facts in found] == [f"cuda:{number}" for number in range(len(specs))]


MEMINFO = "MemTotal:       65536 kB\nMemFree:        1024 kB\nMemAvailable:   32768 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (65536 * 1024, 32768 * 1024)),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "16777216\n", "sys/fs/cgroup/job/memory.current": "4194304\n",
          "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 1048576\n"}, (16777216, 16777216 - 4194304 + 1048576)),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "8388608\n", "sys/fs/cgroup/a/memory.current": "0\n",
          "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "0\n"}, (8388608, 8388608)),
        ({"proc/self/cgroup": "4:memory:/docker/x\n0::/\n", "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "16777216\n",
          "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "8388608\n"}, (16777216, 8388608)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "16777216\n", "sys/fs/cgroup/memory.current": "99999999\n"}, (16777216, 0)),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n"}, (65536 * 1024, 32768 * 1024)),
    ],
    ids=["no group", "v2, file pages can be reclaimed", "v2, the parent's limit", "v1", "v2 inside a container, overdrawn", "v1 unlimited"],
)  # fmt: skip
def test_host_memory_heeds_control_groups(tmp_path: Path, files: dict[str, str], expected: tuple[int, int]) -> None:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert device.host_memory.__module__ == "batchgen.inventory.host"
    assert device.host_memory(tmp_path) == expected
