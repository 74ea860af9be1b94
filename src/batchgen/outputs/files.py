"""Files that are whole or not there: temp file in the same folder, fsync, exclusive link to the final name, fsync of the folder.

Knows nothing of pictures or jobs. Every write of a run that people keep goes through here, so that a kill, a full disk or a
power cut leaves either the old state or the new one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from batchgen.errors import DiskError

TEMP_PREFIX = ".batchgen-"
TEMP_SUFFIX = ".tmp"

_DISK_ERRNOS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "writing is not permitted",
    errno.EPERM: "writing is not permitted",
    errno.EIO: "the disk reports an input/output error",
}

Content = bytes | Callable[[BinaryIO], None]


def disk_error(error: OSError, path: Path) -> DiskError | None:
    """The run-stopping form of an OSError that another picture would only meet again; None for any other error."""
    if error.errno not in _DISK_ERRNOS:
        return None
    what = _DISK_ERRNOS[error.errno]
    if error.errno == errno.ENOSPC and _out_of_inodes(path):
        what = "the file system has no free inodes"
    mend = "Make space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "See that it can be written, or name another place"
    return DiskError(
        f"{what}: {path} could not be written", hint=f"{mend}, and run the same command again. Everything finished so far is kept.",
    )


def _out_of_inodes(path: Path) -> bool:
    with suppress(OSError):
        facts = os.statvfs(path.parent)
        return facts.f_files > 0 and facts.f_favail == 0 and facts.f_bavail > 0
    return False


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns ENOSPC, EDQUOT, EROFS, EACCES and EIO inside the block into DiskError; other errors pass."""
    try:
        yield
    except OSError as error:
        stopping = disk_error(error, path)
        if stopping is None:
            raise
        raise stopping from error


def temp_path(folder: Path) -> Path:
    """A new name in `folder`, known by its process as left over should that die. Short, whatever the final name."""
    return folder / f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}{TEMP_SUFFIX}"


def sync_folder(folder: Path) -> None:
    """Makes names in `folder` survive a power cut. Does nothing where folders cannot be synced."""
    with suppress(PermissionError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            os.close(handle)


def atomic_write(path: Path, content: Content, *, overwrite: bool = False) -> tuple[int, str]:
    """Writes `path` whole and synced, or not at all. Returns its size in bytes and SHA-256 (hex).

    `content` is the bytes, or a function that writes them to an open file. Missing folders are made. Raises
    FileExistsError where the name is taken (unless `overwrite`), DiskError where the disk gives out; the temp file is gone
    either way.
    """
    with disk_errors(path):
        make_folders(path.parent)
        temp = temp_path(path.parent)
        try:
            with temp.open("xb") as handle:
                if callable(content):
                    content(handle)
                else:
                    handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
            measured = measure(temp)
            place(temp, path, overwrite=overwrite)
        finally:
            with suppress(FileNotFoundError):
                temp.unlink()
    return measured


def place(temp: Path, path: Path, *, overwrite: bool = False) -> None:
    """Gives a synced temp file (or folder of files) its final name, atomically. Raises FileExistsError unless `overwrite`."""
    if temp.is_dir():
        if overwrite and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "exists already", str(path))
        temp.rename(path)
    elif overwrite:
        temp.replace(path)
    else:
        _link(temp, path)
    sync_folder(path.parent)


def _link(temp: Path, path: Path) -> None:
    # A hard link fails where the name is taken; a rename would replace what stands there.
    try:
        os.link(temp, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES):
            raise
        if os.path.lexists(path):  # a file system without hard links
            raise FileExistsError(errno.EEXIST, "exists already", str(path)) from error
        temp.rename(path)
    else:
        temp.unlink()


def make_folders(folder: Path) -> None:
    """Like `mkdir -p`, with every new name synced."""
    try:
        if folder.is_dir():
            return
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        said = error.strerror or str(error)
        raise disk_error(error, folder) or DiskError(f"{folder} cannot be made: {said}", hint="Name another folder.") from error
    sync_folder(folder.parent)


def measure(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 (hex) of a file; of a folder of frames: the sum, and the hash over names and hashes."""
    digest = hashlib.sha256()
    if path.is_dir():
        size = 0
        for frame in sorted(path.iterdir()):
            frame_size, frame_hash = measure(frame)
            size += frame_size
            digest.update(f"{frame.name} {frame_hash}\n".encode())
        return size, digest.hexdigest()
    with path.open("rb") as handle:
        size = 0
        while block := handle.read(1 << 20):
            size += len(block)
            digest.update(block)
    return size, digest.hexdigest()


def size_of(path: Path) -> int | None:
    """Size in bytes of a file, or of a folder's files together; None where nothing is."""
    try:
        if path.is_dir():
            return sum(frame.stat().st_size for frame in path.iterdir())
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def sweep_after(pid: int, folders: Iterable[Path]) -> int:
    """Removes what a process that has ended left half-written in these folders. Returns how many."""
    removed = 0
    for folder in folders:
        for path in folder.glob(f"{TEMP_PREFIX}{pid}-*{TEMP_SUFFIX}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            removed += 1
    return removed


def is_temp(name: str) -> bool:
    return name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX)


def sweep(folder: Path) -> int:
    """Removes temp files and folders that a kill left below `folder`. Returns how many. Only with the run's lock held."""
    removed = 0
    for root, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            if not is_temp(name):
                continue
            path = Path(root, name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed += 1
        folders[:] = [name for name in folders if not is_temp(name)]
    return removed
