"""One run per address: an object beside the outputs that says who writes there, renewed while they live. What run.lock is to a folder.

The clocks of two machines are never compared. Whether a holder lives is asked of the system where it ran on this machine; else
of the store's own times; else by watching whether the object changes, for as long as its holder said it may stay unchanged.

Shards of one run share an address, each with a lease of its own; a run of the whole list, or one cut into another number of
shards, has jobs in common with them and is kept out.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from types import TracebackType
from typing import Any

from batchgen.errors import BatchgenError, LeaseHeldError, LeaseLostError
from batchgen.outputs.conditional import ConditionalStore, Seen
from batchgen.outputs.urls import Location
from batchgen.runlock import Holder, lives_here
from batchgen.shards import Shard
from batchgen.units import duration_text

LEASES = "leases"  # below the address
RENEW_SECONDS = 15.0
STALE_SECONDS = 120.0  # not renewed for so long: its holder is taken for dead
LONGEST_STALE_SECONDS = 3600.0  # whatever an object says
_LOOK_SECONDS = 1.0  # between looks at a lease that is watched
_JOIN_SECONDS = 10.0  # that the end of a run waits for a renewal under way
_TRIES = 5  # of taking it while others take and give it back
_NAME = re.compile(r"(?:all|([0-9]+)-of-([0-9]+))\.json", re.ASCII)


def lease_name(shard: Shard | None) -> str:
    """Below the address, of a run of the whole list or of one shard."""
    return f"{LEASES}/{'all' if shard is None else shard.label}.json"


def overlap(name: str, shard: Shard | None) -> bool:
    """Has the holder of the lease `name`, below leases/, jobs in common with `shard`, or with the whole list? Its own lease counts."""
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    if match.group(1) is None or shard is None:
        return True
    number, count = int(match.group(1)), int(match.group(2))
    return count != shard.count or number == shard.number


@dataclass(frozen=True, slots=True)
class Terms:
    """What a lease says. Times of day are the holder's own, for people alone."""

    holder: Holder
    shard: str | None
    renewals: int  # counted, so that every renewal changes the object
    renewed: float  # epoch seconds
    stale_seconds: float

    def as_bytes(self) -> bytes:
        return json.dumps({"schema": 1, **asdict(self)}, indent=1).encode("utf-8")

    @classmethod
    def read(cls, data: bytes) -> Terms:
        """What cannot be read names nobody, but is held."""
        unknown = cls(Holder("an unknown machine", 0, "", "", "", 0.0, ""), None, 0, 0.0, STALE_SECONDS)
        try:
            said: dict[str, Any] = json.loads(data)
            holder = Holder(**{field.name: _as(said["holder"][field.name], str(field.type)) for field in fields(Holder)})
            time.localtime(holder.since)  # as it will be shown
            shard = None if said["shard"] is None else str(Shard.parse(said["shard"]))
            stale = float(said["stale_seconds"])
            if not 0 < stale <= LONGEST_STALE_SECONDS:
                return unknown
            return cls(holder, shard, int(said["renewals"]), float(said["renewed"]), stale)
        except (ValueError, TypeError, KeyError, OverflowError, OSError):
            return unknown


def _as(value: object, kind: str) -> Any:
    """The value, if it is of that kind. Raises TypeError."""
    wanted: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    if not isinstance(value, wanted[kind]) or isinstance(value, bool):
        raise TypeError(kind)
    return value


class Lease:
    """Held from `acquire` to `release`; a thread renews it. Use it as a context manager."""

    def __init__(
        self, location: Location, shard: Shard | None = None, *, renew_seconds: float = RENEW_SECONDS,
        stale_seconds: float = STALE_SECONDS, pause: Callable[[float], None] = time.sleep, holder: Holder | None = None,
    ) -> None:
        """Connects to nothing yet. `pause`: how to wait between looks; `holder`: who takes it, this process by default."""
        self._store = ConditionalStore(location, pause=pause)
        self._shard = shard
        self._name = lease_name(shard)
        self._renew_seconds = renew_seconds
        self._pause = pause
        self._terms = Terms(holder or Holder.me(), None if shard is None else str(shard), 0, time.time(), stale_seconds)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._renewing = threading.Lock()
        self._lost: LeaseLostError | None = None

    # --- taking it ----------------------------------------------------------------------------------------------------

    def acquire(self, *, take_over: bool = False, say: Callable[[str], None] = lambda line: None) -> Lease:
        """Takes the lease, from a holder that has died too. `take_over`: from a living one as well; that one stops by itself.

        May watch another's lease for as long as that may stay unchanged. Raises LeaseHeldError naming the holder, StoreError.
        """
        for _ in range(_TRIES):
            if self._take(take_over, say):
                break
        else:
            seen = self._store.look(self._name)
            raise self._held(seen if seen is not None else Seen(b"", None))
        # from here on it is renewed, since a look at others may take minutes
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()
        try:
            # Two that have jobs in common and begin at the same moment see each other, since each wrote before it looked; both give way.
            for name in self._others():
                self._part_with(name, take_over, say)
        except BaseException:
            self.release()
            raise
        return self

    def _take(self, take_over: bool, say: Callable[[str], None]) -> bool:
        if self._store.create(self._name, self._terms.as_bytes()):
            return True
        seen = self._store.look(self._name)
        if seen is None:
            return False  # given back meanwhile
        if self._is_mine(seen):  # the answer to an earlier try was lost on its way
            return True
        why = self._free(self._name, seen, take_over, say)
        if why is None:
            return False
        taken = self._store.replace(self._name, self._terms.as_bytes(), seen)
        if taken or ((now := self._store.look(self._name)) is not None and self._is_mine(now)):
            say(f"{self._store.shown} is taken over from {Terms.read(seen.data).holder.text}: {why}")
            return True
        return False

    def _part_with(self, name: str, take_over: bool, say: Callable[[str], None]) -> None:
        """Removes the lease of a dead holder that has jobs in common with this one. Raises LeaseHeldError for a living one's."""
        for _ in range(_TRIES):
            seen = self._store.look(name)
            if seen is None:
                return
            last = seen
            why = self._free(name, seen, take_over, say)
            if why is not None and self._store.remove(name, seen):
                say(f"{self._store.shown} is taken over from {Terms.read(seen.data).holder.text}: {why}")
                return
        raise self._held(last)

    def _free(self, name: str, seen: Seen, take_over: bool, say: Callable[[str], None]) -> str | None:
        """Why what was seen may be taken over; None if it changed or went meanwhile. Raises LeaseHeldError for a living holder's."""
        terms = Terms.read(seen.data)
        if take_over:
            return "--take-over says so"
        lives = lives_here(terms.holder)
        if lives:
            raise self._held(seen)
        if lives is False:
            return "that process has ended"
        left = terms.stale_seconds - (seen.age_seconds or 0.0)
        dead = f"it was not renewed for {duration_text(terms.stale_seconds)}"
        if left <= 0:
            return dead
        say(
            f"{self._store.shown} was taken by {terms.holder.text}, which may have died: "
            f"waiting up to {duration_text(left)} to see whether it is still renewed"
        )
        began = time.monotonic()
        while (passed := time.monotonic() - began) < left:
            self._pause(min(_LOOK_SECONDS, left - passed))
            now = self._store.look(name)
            if now is None:
                return None
            if now.data != seen.data:
                raise self._held(now)
        return dead

    def _others(self) -> list[str]:
        """Leases of others that have jobs in common with this one."""
        names = self._store.sizes(LEASES)
        return [f"{LEASES}/{name}" for name in sorted(names) if overlap(name, self._shard) and f"{LEASES}/{name}" != self._name]

    def _is_mine(self, seen: Seen) -> bool:
        return Terms.read(seen.data).holder.token == self._terms.holder.token

    def _held(self, seen: Seen) -> LeaseHeldError:
        terms = Terms.read(seen.data)
        what = f"shard {terms.shard} of this list" if terms.shard is not None else "a run"
        age = f"; renewed {duration_text(seen.age_seconds)} ago" if seen.age_seconds is not None else ""
        shards = "" if self._shard is not None else "share the list out with --shard I/N, "
        return LeaseHeldError(
            f"{self._store.shown} is in use by {what}: {terms.holder.text} by its own clock{age}",
            holder=terms.holder.text,
            hint=f"Wait for it or stop it, give this run another address with -o, {shards}or take the address over with --take-over: "
            "the other run then stops by itself. One that died gives its place up "
            f"{duration_text(terms.stale_seconds)} after its last renewal.",
        )

    # --- holding it ---------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> LeaseLostError | None:
        """What to raise, once somebody else has taken the address over."""
        return self._lost

    def confirm(self) -> LeaseLostError | None:
        """As `lost`, after a look at the store now. A store that does not answer says nothing."""
        with suppress(BatchgenError, OSError):
            self._renew()
        return self._lost

    def _beat(self) -> None:
        while self._lost is None and not self._stop.wait(self._renew_seconds):
            with suppress(Exception):  # a store that fails is told by what is put there; the next beat tries again
                self._renew()

    def _renew(self) -> None:
        with self._renewing:
            if self._stop.is_set() or self._lost is not None:
                return
            seen = self._store.look(self._name, attempts=1)
            if seen is not None and not self._is_mine(seen):
                self._lost = self._gone(seen)
                return
            terms = replace(self._terms, renewals=self._terms.renewals + 1, renewed=time.time())
            if seen is not None:
                if self._store.replace(self._name, terms.as_bytes(), seen, own=True, attempts=1):
                    self._terms = terms
                return  # else somebody was quicker: the next look tells who
            # Removed: by one that has jobs in common with this run, or by hand.
            for name in self._others():
                if (other := self._store.look(name, attempts=1)) is not None:
                    self._lost = self._gone(other)
                    return
            if self._store.create(self._name, terms.as_bytes(), attempts=1):
                self._terms = terms

    def _gone(self, seen: Seen) -> LeaseLostError:
        holder = Terms.read(seen.data).holder
        return LeaseLostError(
            f"{self._store.shown} was taken over by another run: {holder.text} by its own clock; no more work is begun here",
            holder=holder.text,
            hint="All that was finished here is kept, and the other run goes on with what is left.",
        )

    def release(self) -> None:
        """Gives the address free. Does nothing to a lease that is no longer ours; a store that does not answer lets it run out."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(_JOIN_SECONDS)
        self._thread = None
        with suppress(BatchgenError, OSError):
            seen = self._store.look(self._name, attempts=2)
            if seen is not None and self._is_mine(seen):
                self._store.remove(self._name, seen, attempts=2)

    def __enter__(self) -> Lease:
        return self if self._thread is not None else self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

