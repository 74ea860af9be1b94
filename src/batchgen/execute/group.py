"""A rank's link to its group: what must be agreed on before any rank goes on, and equality that is checked, not hoped for.

All ranks of a group run the same jobs in the same order, so that their collective operations meet. What only one of them knows
(a failure, lack of memory, a wish to stop) is told in *rounds* over host memory, before each operation that would wait for a rank
that does not come. A worker that holds its model alone has a link that agrees with itself. Knows nothing of jobs or models.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from batchgen import errors
from batchgen.errors import BatchgenError
from batchgen.execute.fingerprints import difference, fingerprint
from batchgen.execute.recovery import is_out_of_memory
from batchgen.execute.settings import GroupPlace

MEETING_TIMEOUT = timedelta(minutes=10)  # ranks import their libraries from a slow disk
ROUND_TIMEOUT = timedelta(days=1)  # a rank may compute, load or write for long; the supervisor sees dead and hanging ones
MOST_DIFFERENCE = 0.05  # of the largest value; kernels of equal devices round alike, other noise differs by as much as itself
T = TypeVar("T")


class GroupLostError(Exception):
    """Another rank cannot be reached: it is to blame, and this one cannot go on."""

    peer_lost = True  # the worker tells its supervisor so


class GroupDivergedError(Exception):
    """The ranks are not doing the same: nothing they make can be trusted."""


class PeerFailedError(Exception):
    """Another rank failed in the work at hand; `agree` says at what."""


class PeerError(Exception):
    """What failed on another rank. `reason` begins with its name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Alone:
    """The link of a worker without a group."""

    rank, size, leads, cfg_parallel = 0, 1, True, False

    def agree(self, error: Exception | None) -> Exception | None:
        """The failure that all ranks take: their own, another one's, or none. Ends the work that failed."""
        return error

    def vote(self, where: str) -> None:
        """Before an operation that waits for all ranks. Raises PeerFailedError where one has failed and will not come."""

    def told(self, flag: bool) -> bool:
        """The first rank's flag."""
        return flag

    def everywhere(self, flag: bool) -> bool:
        """Whether the flag is set on all ranks."""
        return flag

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return number

    def gather(self, value: T) -> list[T]:
        """The ranks' values, in rank order."""
        return [value]

    def check_same(self, what: str, value: Any) -> None:
        """Raises GroupDivergedError where the ranks' values (see `fingerprint`) differ."""

    def settled(self, what: str, values: T) -> T:
        """The first rank's values on all ranks. Raises GroupDivergedError where another rank's differ by more than rounding."""
        return values


class RankGroup(Alone):
    """The link of one rank among several. Calls must come in the same order on all ranks."""

    def __init__(self, place: GroupPlace, device: torch.device) -> None:
        """Meets the other ranks. Raises GroupLostError where one does not come."""
        self.place = place
        self.rank, self.size, self.leads = place.rank, place.size, place.rank == 0
        self.cfg_parallel = place.cfg_parallel
        self.device = device
        self._failed = False  # a round has told of a failure that the ranks have not agreed on yet
        _use_loopback()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            store = dist.FileStore(place.store, place.size)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=MEETING_TIMEOUT)
            self._control = dist.new_group(backend="gloo", timeout=ROUND_TIMEOUT)
            self.branches = self._pairs() if place.cfg_parallel else None
            self._warm_up()
        except (RuntimeError, OSError, ValueError) as error:
            raise GroupLostError(f"the ranks did not find each other: {error}") from error
        self.check_same("torch version", torch.__version__)

    def _warm_up(self) -> None:
        """The backends take their connections and buffers at the first use: now, while nothing waits, and no memory is short."""
        part = torch.zeros(1, device=self.device)
        _all_gather(part.new_empty(self.size), part, group=dist.group.WORLD)
        if self.branches is not None:
            _all_gather(part.new_empty(2), part, group=self.branches)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _pairs(self) -> Any:
        """The group of this rank and the one that runs its other branch. All ranks make all pairs, as torch wants it."""
        half = self.size // 2
        pairs = [dist.new_group([first, first + half], timeout=ROUND_TIMEOUT) for first in range(half)]
        return pairs[self.rank % half]

    @property
    def mesh(self) -> Any:
        """All ranks as a device mesh of one dimension."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(dist.group.WORLD, self.device.type)  # type: ignore[arg-type]

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _round(self, label: str, number: int = 0, *, failed: bool = False) -> list[int]:
        """Each rank's number. Raises PeerFailedError where a rank has failed, GroupDivergedError where labels differ."""
        if self._failed:  # the others wait in `agree`
            raise PeerFailedError(f"another rank failed before {label}")
        mine = torch.tensor([int(failed), zlib.crc32(label.encode()), number], dtype=torch.int64)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        with _reached():
            dist.all_gather(heard, mine, group=self._control)
        told = [[int(value) for value in each] for each in heard]
        if any(each[0] for each in told):
            self._failed = True
            raise PeerFailedError(f"another rank failed before {label}")
        if len({each[1] for each in told}) > 1:
            raise GroupDivergedError(f"rank {self.rank} came to {label!r}, and another one to something else")
        return [each[2] for each in told]

    def agree(self, error: Exception | None) -> Exception | None:
        if not self._failed:
            with suppress(PeerFailedError):
                self._round("agree", failed=error is not None)
                return None
        self._failed = False
        own = None if isinstance(error, PeerFailedError) else error
        faults = self.gather(None if own is None else _Fault.of(own))
        first = next(number for number, fault in enumerate(faults) if fault is not None)
        if first == self.rank:
            return error
        fault = faults[first]
        assert fault is not None
        made = fault.error(f"rank {first} ({self.place.devices[first]})")
        made.__cause__ = error  # what clears up after a failure finds the frames of this rank's own
        return made

    def vote(self, where: str) -> None:
        self._round(where)

    def told(self, flag: bool) -> bool:
        return bool(self._round("told", int(flag))[0])

    def everywhere(self, flag: bool) -> bool:
        return all(self._round("everywhere", int(flag)))

    def least(self, number: int) -> int:
        return min(self._round("least", number))

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with _reached():
            dist.all_gather_object(found, value, group=self._control)
        return found

    # -- equality ---------------------------------------------------------------------------------------------------

    def check_same(self, what: str, value: Any) -> None:
        found = self._round(what, fingerprint(value))
        if len(set(found)) > 1:
            raise GroupDivergedError(f"the ranks differ in {what}")

    def settled(self, what: str, values: T) -> T:
        if len(set(self._round(what, fingerprint(values)))) == 1:
            return values
        box: list[Any] = [values]
        with _reached():
            dist.broadcast_object_list(box, src=0, group=self._control)
        apart = self.gather(difference(values, box[0]))
        if max(apart) > MOST_DIFFERENCE:
            rank = apart.index(max(apart))
            raise GroupDivergedError(f"{what} of rank {rank} is not rank 0's, by {max(apart):.2g} of its largest value")
        theirs: T = box[0]
        return theirs

    # -- weights and branches ---------------------------------------------------------------------------------------

    def gather_into(self, whole: torch.Tensor, part: torch.Tensor, group: Any, *, async_op: bool = False) -> Any:
        """`whole` [ranks x n] from every rank's `part` [n], after a vote. What a rank could fail at lies before it."""
        self.vote("gather")
        with _reached():
            return _all_gather(whole, part, group=group, async_op=async_op)

    def exchange(self, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both branches' predictions (conditional, unconditional) from this rank's one, of the same shape and dtype."""
        part = mine.contiguous()
        whole = part.new_empty((2, *part.shape))
        self.vote("branches")
        with _reached():
            _all_gather(whole.view(-1), part.view(-1), group=self.branches)
        return whole[0], whole[1]

    @property
    def branch(self) -> int:
        """0: this rank runs the conditional branch; 1: the other one."""
        return int(self.rank >= self.size // 2)


@contextmanager
def _reached() -> Iterator[None]:
    """What the backends raise when a rank is gone, as GroupLostError."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise GroupLostError(str(error).strip().splitlines()[0].split(". ")[0]) from error


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older torch


@dataclass(frozen=True, slots=True)
class _Fault:
    """A failure as the ranks tell it to each other."""

    reason: str
    out_of_memory: bool
    known: str | None  # a class of errors.py
    hint: str | None

    @classmethod
    def of(cls, error: Exception) -> _Fault:
        known = isinstance(error, BatchgenError)
        text = error.message if isinstance(error, BatchgenError) else (str(error).strip().splitlines() or [""])[0]
        reason = text if known else f"{type(error).__name__}: {text}".removesuffix(": ")
        hint = error.hint if isinstance(error, BatchgenError) else None
        return cls(reason, is_out_of_memory(error), type(error).__name__ if known else None, hint)

    def error(self, who: str) -> Exception:
        """The same failure on another rank."""
        reason = f"{who}: {self.reason}"
        if self.out_of_memory:
            return torch.OutOfMemoryError(reason)
        if self.known is not None:
            made = getattr(errors, self.known, errors.ModelError)
            with suppress(TypeError):  # a class with more to say than a message
                found: Exception = made(reason, hint=self.hint)
                return found
            return errors.ModelError(reason, hint=self.hint)
        return PeerError(reason)


def _use_loopback() -> None:
    """The ranks share a machine: they must not look for each other by a host name that may not resolve."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def join(place: GroupPlace | None, device: torch.device) -> Alone:
    """The link that the settings ask for."""
    return Alone() if place is None else RankGroup(place, device)
