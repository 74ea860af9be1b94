"""Is this machine ready for the night? One check a line, each ok, a warning or a failure, with what to do about it.

Every check takes what it needs as arguments and says so in one record, so that a machine with a GPU, a full disk or no network can be
tested on any other. Prints nothing. A token is looked for, never read out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from batchgen.errors import BatchgenError
from batchgen.inventory.records import DeviceFacts, Platform
from batchgen.units import GIB, MIB, counted, size_text

Status = Literal["ok", "warning", "failure"]

# Below this a night of pictures is at risk; the plan forecasts the real need.
LOW_DISK_BYTES = 5 * GIB
# A 1024-pixel PNG is about 1.5 MB: slower than this and writing holds up a fast card.
SLOW_WRITE_BYTES_PER_SECOND = 20 * MIB
_PROBE_BYTES = 32 * MIB
_SHOWN = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface_hub", "tokenizers", "pillow", "av")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `fix` is empty where nothing need be done."""

    name: str
    status: Status
    text: str
    fix: str = ""


def python_check(version: tuple[int, int, int] | None = None) -> Check:
    """The interpreter, against what the package asks for."""
    found = version or sys.version_info[:3]
    text = "Python " + ".".join(map(str, found))
    if found < (3, 11):
        return Check("python", "failure", text, "batchgen needs Python 3.11 or newer")
    return Check("python", "ok", text)


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def library_checks(
    requirements: Sequence[str] | None = None, version_of: Callable[[str], str | None] = installed_version,
) -> Iterable[Check]:
    """Each required library against the package's own requirements; optional ones are named where they are missing."""
    if requirements is None:
        requirements = metadata.requires("batchgen") or []
    for requirement in map(Requirement, requirements):
        extra = _extra_of(requirement)
        found = version_of(requirement.name)
        if found is None:
            if extra is None:
                yield Check(requirement.name, "failure", "not installed", f"pip install '{requirement.name}{requirement.specifier}'")
            else:
                fix = f"pip install 'batchgen[{extra}]' if you need it"
                yield Check(requirement.name, "warning", f"not installed (extra {extra})", fix)
        elif not requirement.specifier.contains(Version(found), prereleases=True):
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Check(requirement.name, "failure", f"{found}, needs {requirement.specifier}", fix)
        elif extra is not None or requirement.name in _SHOWN:
            yield Check(requirement.name, "ok", found)


def _extra_of(requirement: Requirement) -> str | None:
    marker = str(requirement.marker or "")
    return marker.split("extra ==")[1].strip().strip("'\"") if "extra ==" in marker else None


def torchvision_check(
    version_of: Callable[[str], str | None] = installed_version, imports: Callable[[str], str | None] | None = None,
) -> Check | None:
    """A torchvision made for another torch breaks the import of transformers' processors. None where there is no torchvision."""
    found, torch = version_of("torchvision"), version_of("torch")
    if found is None:
        return None
    error = (imports or _import_error)("torchvision")
    if error is None:
        return Check("torchvision", "ok", found)
    fix = "pip uninstall torchvision, or install the one made for this torch"
    return Check("torchvision", "failure", f"{found} does not import beside torch {torch}: {error}", fix)


def _import_error(module: str) -> str | None:
    """The last line of what importing it in a fresh interpreter complains about, or None."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=300, check=False)
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def device_checks(probe: Callable[[], tuple[Platform, tuple[DeviceFacts, ...]]], *, nvidia_driver: bool | None = None) -> Iterable[Check]:
    """The devices a run would take, with their free memory."""
    try:
        platform, devices = probe()
    except BatchgenError as error:
        yield Check("devices", "failure", error.message, error.hint or "")
        return
    if platform == "cpu":
        driver = Path("/proc/driver/nvidia/version").exists() if nvidia_driver is None else nvidia_driver
        fix = "an NVIDIA driver is loaded but no device answers; try nvidia-smi" if driver else "a GPU is needed for full-size models"
        yield Check("devices", "warning", f"no GPU; the CPU with {size_text(devices[0].available_bytes)} free memory", fix)
        return
    for device in devices:
        share = device.available_bytes / device.total_bytes if device.total_bytes else 0.0
        text = f"{device.name}: {size_text(device.available_bytes)} free of {size_text(device.total_bytes)}"
        if share < 0.9 and platform == "cuda":
            yield Check(device.torch_name, "warning", text, "another process holds memory on it; nvidia-smi names it")
        else:
            yield Check(device.torch_name, "ok", text)


def driver_check(platform: Platform, ask: Callable[[], tuple[str, int]] | None = None) -> Check | None:
    """The NVIDIA driver's version and the newest CUDA it runs. None where no GPU of NVIDIA is used.

    `ask` gives the version and CUDA's as NVML counts it (12080 is 12.8).
    """
    if platform != "cuda":
        return None
    try:
        version, cuda = (ask or _ask_driver)()
    except Exception as error:  # noqa: BLE001 NVML's own errors, of which any is the same line here
        return Check("driver", "warning", f"does not tell its version: {error}", "nvidia-smi should say the same")
    return Check("driver", "ok", f"NVIDIA {version}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")


def _ask_driver() -> tuple[str, int]:
    import pynvml

    pynvml.nvmlInit()
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version), int(pynvml.nvmlSystemGetCudaDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def torch_device_check(platform: Platform, ask: Callable[[], tuple[bool, str]] | None = None) -> Check | None:
    """Whether torch itself can use the GPU that the driver shows. None on the CPU. Imports torch, in an interpreter of its own."""
    if platform != "cuda":
        return None
    works, text = (ask or _ask_torch)()
    if works:
        return Check("torch on cuda", "ok", text)
    return Check("torch on cuda", "failure", text, "install a torch build with CUDA for this driver")


def _ask_torch() -> tuple[bool, str]:
    code = "import torch; print(int(torch.cuda.is_available()), torch.version.cuda, torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    parts = done.stdout.split()
    if done.returncode or len(parts) != 3:
        return False, "torch does not import: " + (done.stderr.strip().splitlines() or ["no message"])[-1]
    if parts[0] != "1":
        return False, f"built for CUDA {parts[1]}, sees no device"
    return True, f"CUDA {parts[1]}, {counted(int(parts[2]), 'device')}"


def disk_check(name: str, folder: Path, free_of: Callable[[Path], int] | None = None) -> Check:
    """Free space where `folder` is or will be."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = (free_of or (lambda path: shutil.disk_usage(path).free))(place)
    except OSError as error:
        return Check(name, "failure", f"{folder}: {error.strerror or error}", "choose another folder")
    text = f"{size_text(free)} free at {folder}"
    if free < LOW_DISK_BYTES // 10:
        return Check(name, "failure", text, "make room or choose another folder")
    if free < LOW_DISK_BYTES:
        return Check(name, "warning", text, "a long list of pictures may not fit; `batchgen plan` forecasts the need")
    return Check(name, "ok", text)


def write_check(folder: Path, *, size_bytes: int = _PROBE_BYTES, clock: Callable[[], float] = time.perf_counter) -> Check:
    """Writes, syncs and removes one file in the nearest existing folder: does it work, and how fast?"""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    path = place / f".batchgen-doctor-{os.getpid()}"
    begun = clock()
    try:
        with path.open("xb", buffering=0) as handle:
            for _ in range(size_bytes // MIB):
                handle.write(os.urandom(MIB))
            os.fsync(handle.fileno())
        speed = size_bytes / max(clock() - begun, 1e-9)
    except OSError as error:
        return Check("output folder", "failure", f"{place} cannot be written: {error.strerror or error}", "choose another folder with -o")
    finally:
        path.unlink(missing_ok=True)
    text = f"{place} takes {size_text(round(speed))} a second, synced"
    if speed < SLOW_WRITE_BYTES_PER_SECOND:
        return Check("output folder", "warning", text, "slow for large pictures; a local disk is better")
    return Check("output folder", "ok", text)


def hub_checks(
    *, offline: bool, token: bool, reach: Callable[[], str | None],
) -> Iterable[Check]:
    """Can models be fetched? `reach` gives None where the hub answers, else why not."""
    if offline:
        yield Check("model hub", "warning", "HF_HUB_OFFLINE is set: only cached models", "unset it to download")
    else:
        error = reach()
        if error is None:
            yield Check("model hub", "ok", "answers")
        else:
            yield Check("model hub", "warning", f"does not answer: {error}", "cached models and folders still work")
    if token:
        yield Check("hub token", "ok", "present")
    else:
        yield Check("hub token", "warning", "none", "gated models need one: `hf auth login`")


def video_check(find: Callable[[], str | None] | None = None) -> Check:
    """Is there an encoder for clips? Pictures need none."""
    found = (find or _video_encoder)()
    if found is None:
        return Check("video encoder", "warning", "no H.264 encoder", "pip install 'batchgen[video]' to write MP4")
    return Check("video encoder", "ok", found)


def _video_encoder() -> str | None:
    code = "import av; print(av.codec.Codec('libx264', 'w').name, 'in PyAV', av.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def worst(checks: Iterable[Check]) -> Status:
    """The gravest status among them."""
    found = {check.status for check in checks}
    return "failure" if "failure" in found else "warning" if "warning" in found else "ok"
