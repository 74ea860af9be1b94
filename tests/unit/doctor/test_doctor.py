"""The checks of `batchgen doctor`, each on a machine described by its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen import doctor
from batchgen.errors import UsageError
from batchgen.inventory.records import DeviceFacts
from batchgen.units import GIB


def card(free: float) -> DeviceFacts:
    return DeviceFacts("NVIDIA RTX 4090", "cuda:0", 24 * GIB, round(free * GIB))


DEVICES = [
    ("a free card is ok", lambda: ("cuda", (card(23.5),)), False, [("cuda:0", "ok")]),
    ("a card in use warns", lambda: ("cuda", (card(10),)), False, [("cuda:0", "warning")]),
    ("no card warns", lambda: ("cpu", (DeviceFacts("CPU", "cpu", 16 * GIB, 12 * GIB),)), False, [("devices", "warning")]),
    ("a driver without a device warns", lambda: ("cpu", (DeviceFacts("CPU", "cpu", GIB, GIB),)), True, [("devices", "warning")]),
    ("apple's shared memory is no other process's fault", lambda: ("mps", (DeviceFacts("Apple M4", "mps", 32 * GIB, 9 * GIB),)), False,
     [("mps", "ok")]),
]


@pytest.mark.parametrize(("probe", "driver", "expected"), [row[1:] for row in DEVICES], ids=[row[0] for row in DEVICES])
def test_devices(probe, driver, expected):
    assert [(check.name, check.status) for check in doctor.device_checks(probe, nvidia_driver=driver)] == expected


def test_a_failing_probe_is_a_line_and_no_traceback():
    def probe():
        raise UsageError("CUDA_VISIBLE_DEVICES names no device", hint="unset it")

    (check,) = doctor.device_checks(probe)
    assert (check.status, check.text, check.fix) == ("failure", "CUDA_VISIBLE_DEVICES names no device", "unset it")


REQUIRED = ["torch>=2.11", "diffusers>=0.42", 'pyarrow>=18; extra == "parquet"']
LIBRARIES = [
    ("all there", {"torch": "2.13.0+cpu", "diffusers": "0.42.1", "pyarrow": "19.0"}, {"torch": "ok", "diffusers": "ok", "pyarrow": "ok"}),
    ("a local build counts as its release", {"torch": "2.11.0+cu128", "diffusers": "0.42.1", "pyarrow": "19.0"},
     {"torch": "ok", "diffusers": "ok", "pyarrow": "ok"}),
    ("too old fails", {"torch": "2.5.1", "diffusers": "0.42.1", "pyarrow": "19.0"},
     {"torch": "failure", "diffusers": "ok", "pyarrow": "ok"}),
    ("missing fails, a missing extra warns", {"torch": "2.13.0"}, {"torch": "ok", "diffusers": "failure", "pyarrow": "warning"}),
]


@pytest.mark.parametrize(("installed", "expected"), [row[1:] for row in LIBRARIES], ids=[row[0] for row in LIBRARIES])
def test_libraries(installed, expected):
    assert {check.name: check.status for check in doctor.library_checks(REQUIRED, installed.get)} == expected


def test_libraries_of_this_installation_are_found():
    assert doctor.worst(doctor.library_checks()) != "failure"


def test_torchvision_made_for_another_torch_fails_and_none_is_no_line():
    versions = {"torchvision": "0.20.0", "torch": "2.13.0"}.get
    broken = doctor.torchvision_check(versions, lambda _: "RuntimeError: operator torchvision::nms does not exist")
    assert broken is not None
    assert broken.status == "failure"
    assert "torch 2.13.0" in broken.text
    fine = doctor.torchvision_check(versions, lambda _: None)
    assert fine is not None
    assert fine.status == "ok"
    assert doctor.torchvision_check({}.get) is None


DISKS = [("full", GIB // 4, "failure"), ("nearly full", 2 * GIB, "warning"), ("roomy", 500 * GIB, "ok")]


@pytest.mark.parametrize(("free", "expected"), [row[1:] for row in DISKS], ids=[row[0] for row in DISKS])
def test_disk(free, expected, tmp_path):
    assert doctor.disk_check("disk", tmp_path / "not" / "yet", lambda _: free).status == expected


def test_write_speed_is_measured_and_nothing_stays(tmp_path):
    ticks = iter([0.0, 0.001])
    assert doctor.write_check(tmp_path / "later", size_bytes=2**20, clock=lambda: next(ticks)).status == "ok"
    ticks = iter([0.0, 10.0])
    assert doctor.write_check(tmp_path, size_bytes=2**20, clock=lambda: next(ticks)).status == "warning"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_fails():
    check = doctor.write_check(Path("/proc/batchgen"))
    assert check.status == "failure"
    assert "cannot be written" in check.text


HUB = [
    ("online with a token", {"offline": False, "token": True, "reach": lambda: None}, ["ok", "ok"]),
    ("no network", {"offline": False, "token": False, "reach": lambda: "ConnectError"}, ["warning", "warning"]),
    ("offline is not asked", {"offline": True, "token": False, "reach": lambda: pytest.fail("asked")}, ["warning", "warning"]),
]


@pytest.mark.parametrize(("given", "expected"), [row[1:] for row in HUB], ids=[row[0] for row in HUB])
def test_hub(given, expected):
    assert [check.status for check in doctor.hub_checks(**given)] == expected


def test_torch_is_only_asked_where_a_card_is():
    assert doctor.torch_device_check("cpu", lambda: pytest.fail("asked")) is None
    check = doctor.torch_device_check("cuda", lambda: (False, "built for CUDA None, sees no device"))
    assert check is not None
    assert check.status == "failure"


def test_video_encoder_missing_warns():
    assert doctor.video_check(lambda: None).status == "warning"
    assert doctor.video_check(lambda: "libx264").status == "ok"


def test_the_gravest_counts():
    ok, bad, meh = (doctor.Check("x", status, "") for status in ("ok", "failure", "warning"))
    assert doctor.worst([ok]) == "ok"
    assert doctor.worst([ok, meh]) == "warning"
    assert doctor.worst([meh, bad, ok]) == "failure"


def test_the_driver_is_named_where_there_is_one_and_its_failure_is_a_line():
    assert doctor.driver_check("cpu", lambda: pytest.fail("asked")) is None
    told = doctor.driver_check("cuda", lambda: ("570.86.15", 12080))
    assert told == doctor.Check("driver", "ok", "NVIDIA 570.86.15, for CUDA up to 12.8")

    def broken():
        raise RuntimeError("Driver/library version mismatch")

    check = doctor.driver_check("cuda", broken)
    assert check is not None
    assert (check.status, check.text) == ("warning", "does not tell its version: Driver/library version mismatch")
