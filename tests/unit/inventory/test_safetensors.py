"""Safetensors headers: what a file holds without reading its data, and a clear word for every kind of damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from stub_models import write_weights

from batchgen.errors import ModelError
from batchgen.inventory.safetensors import TensorHeader, read_header, without_ties


def test_a_header_gives_names_dtypes_shapes_and_sizes(tmp_path: Path) -> None:
    write_weights(
        tmp_path / "w.safetensors", {"a": ("bfloat16", [2, 3]), "b": ("float32", [5]), "n": ("int64", []), "z": ("float16", [0, 4])}
    )
    tensors = {tensor.name: tensor for tensor in read_header(tmp_path / "w.safetensors").tensors}
    assert {name: (t.dtype, t.shape, t.elements, t.stored_bytes) for name, t in tensors.items()} == {
        "a": ("BF16", (2, 3), 6, 12),
        "b": ("F32", (5,), 5, 20),
        "n": ("I64", (), 1, 8),
        "z": ("F16", (0, 4), 0, 0),
    }


@pytest.mark.parametrize(
    ("dtype", "torch_dtype", "size"),
    [
        ("F32", "bfloat16", 20),
        ("BF16", "float32", 40),
        ("I64", "bfloat16", 80),
        ("F8_E4M3", "bfloat16", 20),
        ("F8_E4M3", None, 10),
        ("F4", None, 5),
    ],
    ids=["narrowed", "widened", "integers stay", "eight bits widened", "as stored", "half a byte each"],
)
def test_bytes_follow_the_dtype_it_loads_in(dtype: str, torch_dtype: str | None, size: int) -> None:
    assert TensorHeader("t", dtype, (10,)).bytes_as(torch_dtype) == size


def _header(content: object, data: bytes = b"") -> bytes:
    raw = json.dumps(content).encode()
    return struct.pack("<Q", len(raw)) + raw + data


DAMAGE = {
    "an empty file": (b"", "is empty"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "Git LFS pointer"),
    "fewer than eight bytes": (b"abc", "only 3 bytes"),
    "a header length beyond reason": (struct.pack("<Q", 2**40) + b"{}", "no sensible header length"),
    "a header cut short": (struct.pack("<Q", 100) + b'{"a":', "cut short inside its header"),
    "a header that is no JSON": (struct.pack("<Q", 4) + b"{{{{", "header is damaged"),
    "a header that is a list": (_header([1, 2]), "header is damaged"),
    "an unknown dtype": (_header({"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 1]}}), "unknown dtype 'Q7'"),
    "a negative side": (_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "no sensible shape"),
    "an entry without a dtype": (_header({"a": {"shape": [1]}}), "header is damaged"),
    "an entry without offsets": (_header({"a": {"dtype": "F32", "shape": [1]}}), "no data offsets"),
    "data cut short": (
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(10)),
        "10 bytes of data where its header promises 16",
    ),
}


@pytest.mark.parametrize(("content", "said"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.safetensors: cannot be read"):
        read_header(tmp_path / "gone.safetensors")


def _t(name: str, *shape: int) -> TensorHeader:
    return TensorHeader(name, "F32", shape)


TIES = {
    "T5 shares its table with the encoder": (
        [_t("shared.weight", 9, 4), _t("encoder.embed_tokens.weight", 9, 4)],
        False,
        ["shared.weight"],
    ),
    "one name alone stays": ([_t("encoder.embed_tokens.weight", 9, 4)], False, ["encoder.embed_tokens.weight"]),
    "a tied head is counted once": (
        [_t("model.embed_tokens.weight", 9, 4), _t("lm_head.weight", 9, 4)],
        True,
        ["model.embed_tokens.weight"],
    ),
    "an untied head counts": (
        [_t("model.embed_tokens.weight", 9, 4), _t("lm_head.weight", 9, 4)],
        False,
        ["model.embed_tokens.weight", "lm_head.weight"],
    ),
    "another shape is another table": (
        [_t("shared.weight", 9, 4), _t("encoder.embed_tokens.weight", 8, 4)],
        False,
        ["shared.weight", "encoder.embed_tokens.weight"],
    ),
    "a name in two shards counts once": ([_t("a", 2), _t("a", 2)], False, ["a"]),
}


@pytest.mark.parametrize(("tensors", "head_tied", "names"), TIES.values(), ids=TIES.keys())
def test_tied_tables_count_once(tensors: list[TensorHeader], head_tied: bool, names: list[str]) -> None:
    assert [tensor.name for tensor in without_ties(tensors, head_tied=head_tied)] == names


def test_a_file_of_the_safetensors_library_reads_the_same(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    save_file({"a": numpy.zeros((2, 3), "float16"), "n": numpy.zeros(4, "int64")}, tmp_path / "w.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "w.safetensors")
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == {"a": ("F16", (2, 3)), "n": ("I64", (4,))}
    assert header.metadata == (("format", "pt"),)
