"""Layerwise offload: the repeated blocks of a module stream through a few device buffers, copies running beside compute.

A block's weights lie in one flat byte buffer on the host, each storage once, at aligned offsets, and are viewed on the device
in their own dtypes and strides. Which blocks a forward calls, and in which order, is seen in the first pass: the leading
blocks that fit are then kept in for good, the others stream, and from the second pass on each copy is issued as soon as the
buffer it takes over is free. Order between copy and compute is kept by events alone.

Knows nothing of placements, stages or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from batchgen.execute.memory import HostBuffer, host_memory
from batchgen.execute.moving import Chunk, Weights, aligned, chunks_of, empty_bytes, moves, pieces_of, stays


class StreamApi(Protocol):
    """The five things streaming asks of a device: a copy stream, and events between it and the compute stream."""

    overlaps: bool  # whether copies really run beside compute

    def copying(self) -> AbstractContextManager[Any]:
        """Operations inside are issued on the copy stream."""
        ...

    def record_copy(self) -> Any:
        """An event after everything issued on the copy stream so far."""
        ...

    def record_compute(self) -> Any:
        """An event after everything issued on the compute stream so far."""
        ...

    def compute_waits(self, event: Any) -> None: ...

    def copy_waits(self, event: Any) -> None: ...


class CudaStreams:
    """One copy stream beside whatever stream is current."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._copies):
            yield

    def record_copy(self) -> Any:
        return self._copies.record_event()

    def record_compute(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def compute_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def copy_waits(self, event: Any) -> None:
        self._copies.wait_event(event)


class NoStreams:
    """Devices without streams: everything happens in program order."""

    overlaps = False

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record_copy(self) -> Any:
        return None

    def record_compute(self) -> Any:
        return None

    def compute_waits(self, event: Any) -> None:
        """Nothing to wait for."""

    def copy_waits(self, event: Any) -> None:
        """Nothing to wait for."""


def streams_for(device: torch.device) -> StreamApi:
    return CudaStreams(device) if device.type == "cuda" and torch.cuda.is_available() else NoStreams()


def find_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks: members of the outermost module lists of two or more blocks of one class, in registration order.

    Empty for autoencoders, which are entered by `encode` and `decode` and repeat nothing worth streaming.
    """
    if hasattr(module, "encode") and hasattr(module, "decode"):
        return []
    found: list[tuple[str, nn.Module]] = []

    def walk(path: str, here: nn.Module) -> None:
        for key, child in here.named_children():
            name = f"{path}.{key}" if path else key
            blocks = list(child.children()) if isinstance(child, nn.ModuleList) else []
            if len(blocks) > 1 and len({type(block) for block in blocks}) == 1 and next(blocks[0].parameters(), None) is not None:
                found.extend((f"{name}.{index}", block) for index, block in enumerate(blocks))
            else:
                walk(name, child)

    walk("", module)
    return found


def split_chunks(name: str, module: nn.Module) -> tuple[list[Chunk], list[tuple[str, nn.Module, list[Chunk]]]]:
    """What stays in, and per block what streams.

    Outside stays: weights of no block, storages shared between blocks or with anything outside, tensor subclasses (quantised
    weights) and small buffers.
    """
    blocks = find_blocks(module)
    owner: dict[int, int] = {}
    for index, (_, block) in enumerate(blocks):
        for part in block.modules():
            owner[id(part._parameters)] = owner[id(part._buffers)] = index
    outside: list[Chunk] = []
    streamed: list[list[Chunk]] = [[] for _ in blocks]
    for chunk in chunks_of(pieces_of(name, module)):
        owners = {owner.get(id(store), -1) for piece in chunk.pieces for store, _ in piece.places}
        if len(owners) > 1 or owners == {-1} or chunk.opaque or stays(chunk):
            outside.append(chunk)
        else:
            streamed[owners.pop()].append(chunk)
    return outside, [(path, block, chunks) for (path, block), chunks in zip(blocks, streamed, strict=True) if chunks]


@dataclass(slots=True, eq=False)
class Block:
    """One repeated block and the chunks that stream."""

    name: str
    module: nn.Module
    chunks: list[Chunk]
    offsets: list[int]
    size_bytes: int  # of its weights; what a copy counts
    flat_bytes: int  # with the gaps between them
    host: HostBuffer | None = None  # None: copied from the loaded tensors one by one
    place: int | None = None  # among the streamed blocks, in calling order; None: not called yet, or kept
    kept: Weights | None = None
    entries: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # slot -> what the module's places hold

    @classmethod
    def of(cls, name: str, module: nn.Module, chunks: list[Chunk]) -> Block:
        offsets, end = [], 0
        for chunk in chunks:
            offsets.append(end)
            end += aligned(chunk.size_bytes)
        return cls(name, module, chunks, offsets, sum(chunk.size_bytes for chunk in chunks), end)

    def gather(self, buffer: HostBuffer) -> None:
        """Take the flat buffer as the only host copy; the loaded tensors are let go."""
        with moves(), host_memory():
            for chunk, offset in zip(self.chunks, self.offsets, strict=True):
                chunk.copy_into(buffer.bytes, offset)
                chunk.let_go()
        self.host = buffer

    def copy_to(self, flat: torch.Tensor) -> None:
        if self.host is not None:
            flat[: self.flat_bytes].copy_(self.host.bytes, non_blocking=self.host.pinned)
            return
        for chunk, offset in zip(self.chunks, self.offsets, strict=True):
            chunk.copy_into(flat, offset)

    def look_into(self, slot: int, flat: torch.Tensor) -> None:
        """Let the module's weights be views of the slot's buffer; they are made once a visit."""
        pieces = [piece for chunk in self.chunks for piece in chunk.pieces]
        if slot not in self.entries:
            with moves():
                for chunk, offset in zip(self.chunks, self.offsets, strict=True):
                    chunk.put_views(flat, offset)
            self.entries[slot] = [piece.entry() for piece in pieces]
            return
        for piece, entry in zip(pieces, self.entries[slot], strict=True):
            piece.put_entry(entry)

    def look_away(self, device: torch.device) -> None:
        for chunk in self.chunks:
            chunk.put_absent(device)


@dataclass(slots=True)
class Slot:
    """One device buffer: which streamed block's weights it holds, and the events around them."""

    flat: torch.Tensor
    holds: int | None = None  # the block's place
    copied: Any = None  # event after its copy
    computed: Any = None  # event after the block's compute; None while it may still run
    waited: bool = True  # the compute stream has been told to wait for the copy


class BlockStream:
    """A module whose repeated blocks stream. `open` before the module is called, `close` afterwards.

    depth: device buffers, 2 at least. keep_bytes: device memory that leading blocks may take for good. hold: makes the host
    buffer for a block of so many bytes, or None where the host budget does not allow one.
    """

    def __init__(
        self, name: str, module: nn.Module, device: torch.device, *, depth: int, streams: StreamApi, keep_bytes: int = 0,
        hold: Callable[[int], HostBuffer | None] = lambda size_bytes: None,
    ) -> None:
        outside, blocks = split_chunks(name, module)
        if not blocks:
            raise ValueError(f"{name} has no repeated blocks")
        self.name = name
        self.device = device
        self.depth = max(2, depth)
        self.outside = Weights(name, outside, device)
        self.blocks = [Block.of(f"{name}.{path}", block, chunks) for path, block, chunks in blocks]
        self.streamed_bytes = 0  # copied for streamed blocks so far
        self.kept_bytes = 0
        self._streams = streams
        self._keep_bytes = keep_bytes
        self._hold = hold
        self._order: list[Block] = []  # streamed blocks, as they were first called
        self._slots: list[Slot] | None = None
        self._hooks: list[RemovableHandle] = []
        self.outside.keep_in()
        for block in self.blocks:
            block.look_away(device)
            self._hook(block)

    def _hook(self, block: Block) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._before(block)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self._after(block)

        # hooks leave the signature of forward as it is; after an error the block is put away all the same
        self._hooks.append(block.module.register_forward_pre_hook(before))
        self._hooks.append(block.module.register_forward_hook(after, always_call=True))

    @property
    def bytes_in(self) -> int:
        return self.outside.bytes_in + self.block_bytes_in

    @property
    def block_bytes_in(self) -> int:
        return self.streamed_bytes + self.kept_bytes

    @property
    def is_open(self) -> bool:
        return self._slots is not None

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the buffers while open."""
        return self.depth * aligned(max(block.flat_bytes for block in self.blocks))

    @property
    def kept_blocks(self) -> int:
        return sum(block.kept is not None for block in self.blocks)

    def open(self) -> None:
        """Take the device buffers."""
        if self._slots is not None:
            return
        size = max(block.flat_bytes for block in self.blocks)
        like = self.blocks[0].chunks[0].pieces[0].tensor
        with moves():
            slots = [Slot(empty_bytes(size, self.device, like=like)) for _ in range(self.depth)]
        before = self._streams.record_compute()  # whoever had this memory may still be computing with it
        for slot in slots:
            slot.computed = before
        self._slots = slots

    def close(self) -> None:
        """Give the device buffers back. What is kept stays; streamed blocks are absent."""
        if self._slots is None:
            return
        for slot in self._slots:
            if not slot.waited:
                self._streams.compute_waits(slot.copied)  # the memory goes back to the compute stream's allocator
        for block in self._order:
            block.look_away(self.device)
            block.entries.clear()
        self._slots = None

    # -- around each block's forward --------------------------------------------------------------------------------

    def _before(self, block: Block) -> None:
        if self._slots is None:
            return  # its weights are absent, and say so when used
        if block.kept is None and block.place is None:
            self._first_call(block)
        if block.place is None:
            for place in range(min(self.depth, len(self._order))):
                if self._free_for(place):
                    self._issue(place)
            return
        for place in range(block.place, min(block.place + self.depth, len(self._order))):
            if place == block.place or self._free_for(place):
                self._issue(place)
        number, slot = self._slot(block.place)
        if not slot.waited:
            self._streams.compute_waits(slot.copied)
            slot.waited = True
        slot.computed = None
        block.look_into(number, slot.flat)

    def _after(self, block: Block) -> None:
        if self._slots is None or block.place is None:
            return
        _, slot = self._slot(block.place)
        if slot.holds != block.place:
            return
        slot.computed = self._streams.record_compute()
        block.look_away(self.device)
        if block.place + self.depth < len(self._order):
            self._issue(block.place + self.depth)

    def _first_call(self, block: Block) -> None:
        """Keep the block if it is a leading one and there is room, else give it its place in the stream."""
        if not self._order and self.kept_bytes + block.size_bytes <= self._keep_bytes:
            weights = Weights(block.name, block.chunks, self.device)
            try:
                weights.keep_in()
            except BaseException:
                block.look_away(self.device)
                raise
            block.kept = weights
            self.kept_bytes += block.size_bytes
            return
        if not block.chunks[0].fake:
            buffer = self._hold(block.flat_bytes)
            if buffer is not None:
                block.gather(buffer)
        block.place = len(self._order)
        self._order.append(block)

    def _slot(self, place: int) -> tuple[int, Slot]:
        assert self._slots is not None
        return place % self.depth, self._slots[place % self.depth]

    def _free_for(self, place: int) -> bool:
        """Whether the slot can be taken for this place now: what it holds has run already."""
        _, slot = self._slot(place)
        return slot.computed is not None and (slot.holds is None or slot.waited)

    def _issue(self, place: int) -> None:
        """Copy a block into its slot, after the compute of the block that it takes over from."""
        _, slot = self._slot(place)
        if slot.holds == place:
            return
        block = self._order[place]
        # no event: that block's forward did not end (an error); everything issued so far is then what to wait for
        self._streams.copy_waits(slot.computed if slot.computed is not None else self._streams.record_compute())
        with moves(), self._streams.copying():
            block.copy_to(slot.flat)
        slot.copied = self._streams.record_copy()
        slot.holds, slot.waited = place, False
        self.streamed_bytes += block.size_bytes

    # -- the end ----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Take hooks and buffers away: the module holds plain host tensors again."""
        self.close()
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self.outside.to_host()
        for block in self.blocks:
            if block.kept is not None:
                block.kept.to_host()
                continue
            part = Weights(block.name, block.chunks, self.device)
            if block.host is None:
                part.restore()
                continue
            with moves(), host_memory():
                for chunk, offset in zip(block.chunks, block.offsets, strict=True):
                    chunk.put_views(block.host.bytes, offset)
            part.to_host()
            block.host.free()
        self._order = []
