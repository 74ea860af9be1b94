"""Files are whole or not there, and never replace what is not ours."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from batchgen.errors import DiskError
from batchgen.outputs import files
from batchgen.outputs.files import atomic_write, measure, size_of, sweep, sweep_after, temp_path


def test_size_and_hash_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.bin"
    assert atomic_write(path, b"hello") == (5, hashlib.sha256(b"hello").hexdigest()) == measure(path)
    assert os.listdir(path.parent) == ["x.bin"]


def test_content_by_a_function(tmp_path: Path) -> None:
    def write(handle: BinaryIO) -> None:
        handle.write(b"ab")
        handle.seek(0)
        handle.write(b"c")

    atomic_write(tmp_path / "x", write)
    assert (tmp_path / "x").read_bytes() == b"cb"


def test_a_taken_name_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "x", b"other")
    assert (tmp_path / "x").read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["x"]


def test_a_dangling_link_is_a_taken_name(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "x", b"other")
    assert not (tmp_path / "nowhere").exists()


def test_a_taken_name_is_refused_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    atomic_write(tmp_path / "x", b"first")
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "x", b"second")
    assert (tmp_path / "x").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["x"]


def test_overwrite_replaces(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    atomic_write(tmp_path / "x", b"new", overwrite=True)
    assert (tmp_path / "x").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
    ],
)
def test_a_disk_that_gives_out_stops_the_run_and_leaves_nothing(tmp_path: Path, number: int, words: str) -> None:
    def write(handle: BinaryIO) -> None:
        handle.write(b"half")
        raise OSError(number, os.strerror(number))

    with pytest.raises(DiskError, match=words):
        atomic_write(tmp_path / "x", write)
    assert os.listdir(tmp_path) == []


def test_an_encoder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(handle: BinaryIO) -> None:
        handle.write(b"half")
        raise ValueError("no such picture")

    with pytest.raises(ValueError, match="no such picture"):
        atomic_write(tmp_path / "x", write)
    assert os.listdir(tmp_path) == []


def test_a_full_device_is_a_full_disk() -> None:
    with pytest.raises(DiskError, match="full"), files.disk_errors(Path("/dev/full")), open("/dev/full", "wb") as full:
        full.write(b"x" * 10_000)


def test_names_of_255_bytes_can_be_written(tmp_path: Path) -> None:
    name = "猫" * 83 + "x.png"
    assert len(name.encode()) == 254
    atomic_write(tmp_path / name, b"x")
    assert os.listdir(tmp_path) == [name]


def test_only_left_over_temp_files_are_swept(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    temp_path(tmp_path).write_bytes(b"half")
    temp_path(tmp_path / "sub").mkdir()
    for kept in (".batchgen-notes", "x.tmp", "picture.png"):
        (tmp_path / kept).write_bytes(b"keep")
    assert sweep(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == [".batchgen-notes", "picture.png", "sub", "x.tmp"]


def test_after_a_process_only_its_own_temp_files_are_swept(tmp_path: Path) -> None:
    temp_path(tmp_path).write_bytes(b"half")
    (tmp_path / ".batchgen-1-00.tmp").write_bytes(b"another's")
    assert sweep_after(os.getpid(), [tmp_path]) == 1
    assert os.listdir(tmp_path) == [".batchgen-1-00.tmp"]


def test_a_folder_of_frames_has_a_size_and_a_hash_that_change_with_it(tmp_path: Path) -> None:
    clip = tmp_path / "clip"
    clip.mkdir()
    (clip / "0.png").write_bytes(b"aa")
    (clip / "1.png").write_bytes(b"bbb")
    before = measure(clip)
    assert before[0] == 5 == size_of(clip)
    (clip / "1.png").write_bytes(b"bbc")
    assert measure(clip)[1] != before[1]


def test_nothing_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert size_of(tmp_path / "x") is None
    assert size_of(tmp_path / "file" / "x") is None
