"""How many bytes a placement moves: the arithmetic of the executor's moves, for plans and for checks of what was measured.

Pure numbers; sizes in bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence


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


def turns(order: Sequence[str], name: str, rivals: Collection[str], batches: int) -> int:
    """How often a component comes in while its stage is open once and runs so many batches.

    `order`: components as one batch calls them. `rivals` are never in together with it: whichever is called comes in and puts the
    other out, so that each batch brings all of them in again, but for one that ends a batch and begins the next.
    """
    if batches < 1:
        return 0
    runs = [part for part, _ in itertools.groupby(part for part in order if part == name or part in rivals)]
    found = runs.count(name)
    if found == len(runs):  # nobody puts it out
        return min(1, found)
    stays = runs[0] == runs[-1] == name
    return found * batches - (batches - 1 if stays else 0)


def windows(jobs: int, first: int, size: int) -> tuple[tuple[int, int], ...]:
    """A list of jobs as one worker is given it: (jobs of a window, how many such windows).

    `first`: one batch, so that the first pictures come soon; no later window is smaller than that, but the last.
    """
    head, size = min(jobs, max(1, first)), max(1, first, size)
    whole, rest = divmod(jobs - head, size)
    return tuple((rows, times) for rows, times in ((head, 1), (size, whole), (rest, 1)) if rows and times)
