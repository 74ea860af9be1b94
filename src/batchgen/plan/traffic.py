"""How many bytes a placement moves: the arithmetic of the executor's moves, for plans and for checks of what was measured.

Pure numbers; sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence


def kept_blocks(block_bytes: Sequence[int], keep_bytes: int) -> int:
    """How many leading blocks, in calling order, stay in for good within `keep_bytes`."""
    total = 0
    for count, size in enumerate(block_bytes):
        total += size
        if total > keep_bytes:
            return count
    return len(block_bytes)


def streamed_bytes(block_bytes: Sequence[int], kept: int, depth: int, forwards: int) -> int:
    """Bytes copied for the blocks that stream while a stage is open once and its module is called `forwards` times.

    Every forward copies every streamed block, but for those still in their buffer from the forward before: all of them where
    the buffers (`depth`) hold all, else the few whose buffer nobody took over.
    """
    streamed = list(block_bytes[kept:])
    if forwards == 0 or not streamed:
        return 0
    still_there = sum(streamed[max(0, len(streamed) - depth) : depth])
    return sum(streamed) + (forwards - 1) * (sum(streamed) - still_there)


def layerwise_bytes(outside_bytes: int, block_bytes: Sequence[int], *, kept: int, depth: int, visits: Sequence[int]) -> int:
    """All bytes a streamed component moves: what stays in once, then its blocks; `visits` lists the forwards of each opening."""
    return outside_bytes + sum(block_bytes[:kept]) + sum(streamed_bytes(block_bytes, kept, depth, forwards) for forwards in visits)
