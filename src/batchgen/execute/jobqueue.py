"""The queue of a run: how many jobs a worker gets at once, and which. The journal holds them; here is only the choice.

Windows are large while much is left, so that moving weights is cheap, and shrink towards the end, so that no worker renders a
full window while the others have nothing. Jobs of one shape stay together, in whole batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.jobs import Job, ShapeKey
from batchgen.journal import Journal

_LOOKAHEAD = 8  # times a window's jobs are looked at for some of one shape
_MOST_LOOKED_AT = 2048


@dataclass(frozen=True, slots=True)
class Taken:
    """A window's jobs, marked as running in the journal. `spooled`: key -> latents below the run folder."""

    number: int
    jobs: tuple[Job, ...]
    spooled: dict[str, str]

    @property
    def shape(self) -> ShapeKey | None:
        """Of the last jobs: what the worker has at hand when it comes back."""
        return self.jobs[-1].shape if self.jobs else None


def window_size(left: int, workers: int, *, batch: int, full: int, first: bool = False) -> int:
    """Jobs of the next window: one batch at first, then `full`; with several workers at most half of an even share of what is `left`.

    Whole batches, one at least. So the last windows end within a batch or two of each other, whoever takes them.
    """
    if first:
        return batch
    if workers <= 1:
        return full
    return max(batch, min(full, left // (2 * workers) // batch * batch))


def choose(jobs: Sequence[Job], count: int, *, batch: int, prefer: ShapeKey | None = None) -> list[Job]:
    """Up to `count` of the jobs that wait, given in their order: those of one shape, then whole batches or the whole rest of others.

    `prefer`: the shape to begin with if any job has it, else the first job's.
    """
    groups: dict[ShapeKey, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.shape, []).append(job)
    order = list(groups)
    if prefer in groups:
        order.sort(key=lambda shape: shape != prefer)
    chosen: list[Job] = []
    for shape in order:
        room, group = count - len(chosen), groups[shape]
        if chosen and len(group) > room:
            room = room // batch * batch  # a batch that is cut in two costs as much as two
        chosen += group[:room]
    return chosen


class JobQueue:
    """Gives out windows. Mutable only in the journal: whatever dies, what is left is what the journal says."""

    def __init__(self, journal: Journal, *, first: int, full: int) -> None:
        """`first`: jobs of one batch; `full`: of a window while much is left."""
        self._journal = journal
        self._batch, self._full = first, full

    def take(self, worker: int, *, workers: int, first: bool, prefer: ShapeKey | None = None) -> Taken:
        """The next window for a worker, of `workers` that take some; without jobs where none wait.

        Jobs with spooled latents come before all others: their denoising is paid for.
        """
        count = window_size(self._journal.pending(), workers, batch=self._batch, full=self._full, first=first)

        def chosen(jobs: Sequence[Job], spooled: bool) -> list[Job]:
            return choose(jobs, count, batch=self._batch, prefer=None if spooled else prefer)

        looked_at = max(count, min(_LOOKAHEAD * count, _MOST_LOOKED_AT))
        number, jobs, latents = self._journal.take(looked_at, worker, choose=chosen)
        return Taken(number, tuple(jobs), latents)
