"""The one primitive that moves weights: it replaces entries of a module's `_parameters` and `_buffers`, once per storage.

A weight that is out is an *absent* tensor: it has the weight's shape, dtype and execution device, and raises when it is
used. So a module that a placement forgot is an error on every device, the CPU too. On a CPU a move is a real copy, so that
placements are carried out, counted and tested without a GPU. On fake tensors nothing is copied, but everything is counted.

Knows nothing of placements, stages or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from batchgen.execute.memory import host_memory, is_metered

ALIGNMENT = 256  # bytes; what CUDA's allocator gives, and more than any CPU kernel asks for
STAYING_BUFFER_BYTES = 2**20  # buffers up to this size never leave: pipelines read some of them outside forward (LTX, FLUX.2)

_UNHARMED = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class AbsentWeightError(RuntimeError):
    """A weight was used while its component was out. `weight` is its full name."""

    def __init__(self, weight: str, device: torch.device, used_by: str) -> None:
        super().__init__(f"{weight} is not on {device}: its component was not moved in for this stage (used by {used_by})")
        self.weight = weight


class Absent(torch.Tensor):
    """Shape, strides, dtype and execution device of a weight whose bytes are elsewhere. No storage."""

    weight_name: str
    holds_no_bytes = True  # memory meters ask for it: torch reports a nominal storage of the full size

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, name: str) -> Absent:
        made: Absent = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False,
        )
        return made

    def __init__(self, like: torch.Tensor, device: torch.device, name: str) -> None:
        self.weight_name = name

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({self.weight_name}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent))
        if func in _UNHARMED:
            return Absent(first, first.device, first.weight_name)
        raise AbsentWeightError(first.weight_name, first.device, str(func))


@contextmanager
def moves() -> Iterator[None]:
    """Ordinary tensors, without autograd, also when the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(slots=True)
class Piece:
    """One distinct tensor object and every place in the module that holds it."""

    name: str
    tensor: torch.Tensor  # as found; only its shape, strides and dtype are used once the chunk has let go of the host's bytes
    is_parameter: bool
    offset_bytes: int  # from the start of its chunk
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    absent: torch.Tensor | None = None

    def put(self, value: torch.Tensor) -> None:
        """Write `value` to every place of this tensor; tied names stay one object."""
        entry = nn.Parameter(value, requires_grad=False) if self.is_parameter else value
        self.put_entry(entry)

    def put_entry(self, entry: torch.Tensor) -> None:
        for store, key in self.places:
            store[key] = entry

    def entry(self) -> torch.Tensor:
        """What the module holds now."""
        store, key = self.places[0]
        found: torch.Tensor = store[key]
        return found

    def put_absent(self, device: torch.device) -> None:
        if self.absent is None:
            gone = Absent(self.tensor, device, self.name)
            self.absent = nn.Parameter(gone, requires_grad=False) if self.is_parameter else gone
        self.put_entry(self.absent)

    def bytes_around(self, tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
        """The chunk's bytes, as uint8, where `tensor` is this tensor's view of them."""
        return _bytes_of(tensor, int(tensor.storage_offset()) * tensor.element_size() - self.offset_bytes, size_bytes)

    def view_of(self, flat: torch.Tensor, start_bytes: int) -> torch.Tensor:
        """This tensor, in its own dtype and strides, over bytes of `flat` (uint8) from `start_bytes`."""
        like = self.tensor
        offset = (start_bytes + self.offset_bytes) // like.element_size()
        if isinstance(flat, FakeTensor):
            with flat.fake_mode:  # its cache of operations would keep a storage given to `set_` alive
                return flat.view(like.dtype).as_strided(like.shape, like.stride(), offset)
        return torch.empty(0, dtype=like.dtype, device=flat.device).set_(flat.untyped_storage(), offset, like.shape, like.stride())


@dataclass(slots=True)
class Chunk:
    """A span of one storage, moved at once, with the tensors that look into it."""

    pieces: list[Piece]
    size_bytes: int
    host: torch.Tensor | None  # uint8 view of the host's bytes; None when opaque or let go
    opaque: bool = False  # a tensor subclass (quantised, ...): moved by its own `to`, never streamed
    fake: bool = False
    pinned: bool = False

    def copy_into(self, flat: torch.Tensor, start_bytes: int) -> None:
        """Copy the host's bytes to `flat[start_bytes:]`. Nothing to do on fake tensors."""
        if self.fake or self.size_bytes == 0:
            return
        assert self.host is not None
        flat[start_bytes : start_bytes + self.size_bytes].copy_(self.host, non_blocking=self.pinned)

    def put_views(self, flat: torch.Tensor, start_bytes: int) -> None:
        for piece in self.pieces:
            piece.put(piece.view_of(flat, start_bytes))

    def room(self, device: torch.device) -> torch.Tensor | None:
        """Memory for this chunk on the device; None where the tensor makes its own."""
        return None if self.opaque else empty_bytes(self.size_bytes, device, like=self.pieces[0].tensor)

    def bring_in(self, device: torch.device, flat: torch.Tensor | None) -> None:
        """Copy into `flat` (from `room`) and let the module look at it."""
        if flat is None:
            (piece,) = self.pieces
            piece.put_entry(piece.tensor.to(device, copy=True))
            return
        self.copy_into(flat, 0)
        self.put_views(flat, 0)


    def settle_on_host(self) -> None:
        """Copy the bytes, from the module's own tensors or from the host's where those are absent, to fresh host memory."""
        host = torch.device("cpu")
        first = self.pieces[0]
        now = first.entry()
        if self.opaque:
            first.tensor = (now if not isinstance(now, Absent) else first.tensor).to(host, copy=True)
            first.put_entry(first.tensor)
            return
        if not self.fake and not isinstance(now, Absent):
            self.host = first.bytes_around(now, self.size_bytes)
        self.bring_in(host, self.room(host))
        for piece in self.pieces:
            piece.tensor = piece.entry()
        self.host, self.pinned = (None if self.fake else first.bytes_around(first.tensor, self.size_bytes)), False

    def put_absent(self, device: torch.device) -> None:
        for piece in self.pieces:
            piece.put_absent(device)

    def lies_ready(self, device: torch.device) -> bool:
        """Whether the loaded tensors can be used where they are: on the device, and aligned as a copy would be.

        Kernels sum unaligned weights (mapped from a file) in another order: with this, every placement gives the same bits.
        """
        if self.opaque or self.pieces[0].tensor.device != device or (device.type == "cpu" and is_metered(device)):
            return False  # a meter of the CPU counts what was copied for the device, not what was loaded
        return self.fake or self.host is None or self.host.data_ptr() % 64 == 0

    def let_go(self) -> None:
        """Forget the host's bytes; the pieces keep an absent tensor for shape, strides and dtype."""
        if self.opaque or self.fake:
            return
        self.host = None
        for piece in self.pieces:
            piece.tensor = Absent(piece.tensor, piece.tensor.device, piece.name)


def empty_bytes(size_bytes: int, device: torch.device, *, like: torch.Tensor | None = None) -> torch.Tensor:
    """Uninitialised uint8 tensor, its length rounded up to the alignment; fake if `like` is fake."""
    length = aligned(size_bytes)
    if isinstance(like, FakeTensor):
        with like.fake_mode:
            return torch.empty(length, dtype=torch.uint8, device=device)
    return torch.empty(length, dtype=torch.uint8, device=device)


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def is_opaque(tensor: torch.Tensor) -> bool:
    """A tensor subclass whose bytes are its own business: quantised weights, sharded weights."""
    return type(tensor) not in _PLAIN_TYPES


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last-but-one byte of the storage that the tensor looks at."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + int(reach) * tensor.element_size()


def pieces_of(name: str, module: nn.Module) -> list[Piece]:
    """Every distinct tensor of the module with its places. Raises ValueError for one that was never loaded."""
    found: dict[int, Piece] = {}
    for path, owner in module.named_modules():
        stores: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for store in stores:
            for key, tensor in store.items():
                if tensor is None:
                    continue
                full = ".".join(part for part in (name, path, key) if part)
                if tensor.device.type == "meta" and not isinstance(tensor, FakeTensor):
                    raise ValueError(f"{full} is on the meta device: it was never loaded")
                piece = found.setdefault(id(tensor), Piece(full, tensor, isinstance(tensor, nn.Parameter), 0))
                piece.places.append((store, key))
    return list(found.values())


def chunks_of(pieces: Iterable[Piece]) -> list[Chunk]:
    """Group tensors by storage: what shares a storage moves together, and only the bytes that are looked at."""
    by_storage: dict[int, list[Piece]] = {}
    chunks: list[Chunk] = []
    for piece in pieces:
        if is_opaque(piece.tensor):
            chunks.append(Chunk([piece], piece.tensor.nbytes, None, opaque=True))
        else:
            by_storage.setdefault(_storage_key(piece.tensor), []).append(piece)
    for shared in by_storage.values():
        spans = [_span(piece.tensor) for piece in shared]
        low = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT if len(shared) > 1 else spans[0][0]
        high = max(end for _, end in spans)
        for piece, (start, _) in zip(shared, spans, strict=True):
            piece.offset_bytes = start - low
        fake = isinstance(shared[0].tensor, FakeTensor)
        host = None if fake else _bytes_of(shared[0].tensor, low, high - low)
        chunks.append(Chunk(shared, high - low, host, fake=fake))
    return chunks


def _bytes_of(tensor: torch.Tensor, start: int, size_bytes: int) -> torch.Tensor:
    with host_memory():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (size_bytes,), (1,))


def stays(chunk: Chunk) -> bool:
    """Small buffers never leave the device: some are read by the pipeline itself, outside any forward."""
    return not chunk.opaque and chunk.size_bytes <= STAYING_BUFFER_BYTES and not any(piece.is_parameter for piece in chunk.pieces)


class Weights:
    """The weights of one module (or part of one): in, with their bytes on the device, or out, absent.

    `bytes_in` counts every byte copied onto the device. The host's bytes are whatever the module was loaded with (mapped files
    as they are) until `hold` makes a copy of its own.
    """

    def __init__(self, name: str, chunks: Iterable[Chunk], device: torch.device) -> None:
        self.name = name
        self.device = device
        self.bytes_in = 0
        self.is_in = False
        chunks = list(chunks)
        self.staying = [chunk for chunk in chunks if stays(chunk)]
        self.moving = [chunk for chunk in chunks if not stays(chunk)]
        self._keep: object = None  # the pinned buffer, while there is one
        self._settled = False

    @classmethod
    def of(cls, name: str, module: nn.Module, device: torch.device) -> Weights:
        """All weights of a module. Raises ValueError for one on the meta device."""
        return cls(name, chunks_of(pieces_of(name, module)), device)

    @property
    def moving_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.moving)

    @property
    def staying_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.staying)

    def settle(self) -> int:
        """Bring the small buffers in for good. Returns bytes copied; later calls copy nothing."""
        if self._settled:
            return 0
        with moves():
            for chunk in self.staying:
                chunk.bring_in(self.device, chunk.room(self.device))
        self._settled = True
        self.bytes_in += self.staying_bytes
        return self.staying_bytes

    def into(self, copying: Callable[[], AbstractContextManager[Any]] = nullcontext) -> int:
        """Copy everything onto the device. Returns bytes copied. If memory runs out, nothing stays in.

        Memory is taken on the current stream, then the copies are issued inside `copying()`, which may be another stream.
        """
        if self.is_in:
            return 0
        copied = self.settle()
        try:
            with moves():
                rooms = [chunk.room(self.device) for chunk in self.moving]
                with copying():
                    for chunk, flat in zip(self.moving, rooms, strict=True):
                        chunk.bring_in(self.device, flat)
        except BaseException:
            self.out()
            raise
        self.is_in = True
        self.bytes_in += self.moving_bytes
        return copied + self.moving_bytes

    def out(self) -> None:
        """Drop the device's bytes. Nothing is copied back."""
        with moves():
            for chunk in self.moving:
                chunk.put_absent(self.device)
        self.is_in = False

    def keep_in(self) -> int:
        """Bring everything in for good and let the host's bytes go. Returns bytes copied. If memory runs out, nothing stays in.

        What already lies on the device, aligned, is taken as it is.
        """
        copied = 0
        chunks = (*self.staying, *self.moving)
        try:
            with moves():
                for chunk in chunks:
                    if chunk.lies_ready(self.device):
                        for piece in chunk.pieces:
                            piece.put(piece.tensor.detach())
                        continue
                    chunk.bring_in(self.device, chunk.room(self.device))
                    copied += chunk.size_bytes
        except BaseException:
            self.restore()
            raise
        for chunk in chunks:
            chunk.let_go()
        self.is_in = self._settled = True
        self.bytes_in += copied
        return copied

    def hold(self, flat: torch.Tensor, *, pinned: bool, keep: object = None) -> None:
        """Take `flat` (uint8, `flat_bytes` long) as the host's copy, filled from what there is, and let the old bytes go."""
        start = 0
        with moves(), host_memory():
            for chunk in self.moving:
                if chunk.opaque or chunk.fake:
                    continue
                room = flat[start : start + chunk.size_bytes]
                assert chunk.host is not None
                room.copy_(chunk.host)
                chunk.host, chunk.pinned = room, pinned
                for piece in chunk.pieces:
                    piece.tensor = torch.empty(0, dtype=piece.tensor.dtype).set_(
                        flat.untyped_storage(), (start + piece.offset_bytes) // piece.tensor.element_size(),
                        piece.tensor.shape, piece.tensor.stride(),
                    )
                start += aligned(chunk.size_bytes)
        self._keep = keep
        if not self.is_in:
            self.out()

    @property
    def flat_bytes(self) -> int:
        """Length of the buffer that `hold` needs."""
        return sum(aligned(chunk.size_bytes) for chunk in self.moving if not chunk.opaque)

    def restore(self) -> None:
        """Put the host's tensors back into the module: the placement is removed. Raises RuntimeError if they were let go."""
        with moves(), host_memory():
            for chunk in (*self.staying, *self.moving):
                for piece in chunk.pieces:
                    if not chunk.fake and not chunk.opaque and chunk.host is None:
                        raise RuntimeError(f"{piece.name}: the host's bytes were let go")
                    piece.put_entry(piece.tensor if isinstance(piece.tensor, nn.Parameter) == piece.is_parameter
                                    else nn.Parameter(piece.tensor, requires_grad=False))
        self.is_in = self._settled = False
        self._keep = None


    def to_host(self) -> None:
        """Give the module plain host tensors of its own, copied from where the bytes are now. The placement is removed."""
        with moves(), host_memory():
            for chunk in (*self.staying, *self.moving):
                chunk.settle_on_host()
        self._keep = None
        self.is_in = self._settled = False
