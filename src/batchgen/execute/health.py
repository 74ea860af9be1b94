"""Is a device still worth giving work to? One that fails again and again, or has become much slower than it was, leaves the queue.

Pure: counts and seconds in, reasons out. Never says so of the last device: what fails everywhere is the model or the jobs, and the
whole run is hopeless then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

MAX_BARREN = 3  # deaths in a row with no batch begun
MAX_FRUITLESS = 3  # deaths in a row with no picture between, each on jobs that had ended no worker before
MAX_BARREN_IN_ALL = 3  # of all devices together: the model, not a job
MAX_FRUITLESS_IN_ALL = 16  # of all devices together, on whatever jobs
SLOWER = 4.0  # times its own best, and times what the others take
SLOW_BATCHES = 3  # in a row: one slow batch is another program's doing
_KEPT = 32  # batches that a usual speed is taken from

Kind = tuple[str, str]  # stage and shape


@dataclass(slots=True)
class _Device:
    barren: int = 0
    fruitless: int = 0
    pictures: int = 0
    slow: int = 0  # batches in a row
    blamed: set[str] = field(default_factory=set)  # jobs suspected since its last picture
    usual: dict[Kind, deque[float]] = field(default_factory=dict)  # seconds a row, slow batches left out
    lately: dict[Kind, deque[float]] = field(default_factory=dict)  # seconds a row, of the last few batches


class Health:
    """Of all seats of a run, by their number. Mutable; one thread."""

    def __init__(self) -> None:
        self._devices: dict[int, _Device] = {}
        self._barren = self._fruitless = 0  # of all devices together
        self.suspected: set[str] = set()  # jobs suspected of any death since the last picture

    def _of(self, seat: int) -> _Device:
        return self._devices.setdefault(seat, _Device())

    def began(self, seat: int) -> None:
        self._of(seat).barren = self._barren = 0

    def picture(self, seat: int) -> None:
        device = self._of(seat)
        device.pictures += 1
        device.fruitless = device.barren = 0
        device.blamed.clear()
        self._fruitless = self._barren = 0
        self.suspected.clear()

    def died(self, seat: int, suspects: Iterable[str], *, known_killers: bool, lost: bool = False) -> None:
        """`suspects`: the jobs of the batch in flight, none where no batch was; `known_killers`: they had ended a worker before.

        `lost`: its machine is gone, which says nothing of the model.
        """
        device, blamed = self._of(seat), set(suspects)
        device.blamed |= blamed
        self.suspected |= blamed
        self._fruitless += not lost
        self._barren += not (blamed or lost)
        if not blamed:
            device.barren += 1
        elif not known_killers:
            device.fruitless += 1

    def batch(self, seat: int, kind: Kind, seconds: float, rows: int) -> None:
        """A batch is done: so many seconds for so many rows."""
        device, each = self._of(seat), seconds / max(1, rows)
        own = device.usual.setdefault(kind, deque(maxlen=_KEPT))
        device.lately.setdefault(kind, deque(maxlen=SLOW_BATCHES)).append(each)
        others = [value for number, other in self._devices.items() if number != seat for value in other.lately.get(kind, ())]
        theirs = median(others) if others else None
        usual = median(own) if len(own) >= SLOW_BATCHES else None
        if usual is not None and theirs is not None and each > SLOWER * usual and each > SLOWER * theirs:
            device.slow += 1  # not taken into its usual speed: that would make slow usual
        else:
            device.slow = 0
            own.append(each)

    def left(self) -> None:
        """A device has left the queue: the deaths so far were its own."""
        self._barren = self._fruitless = 0

    def hopeless(self, seats: Iterable[int]) -> bool:
        """Whether no worker lives long enough, on whichever of these devices."""
        unproven = all(self._of(seat).barren for seat in seats)
        return (self._barren >= MAX_BARREN_IN_ALL and unproven) or self._fruitless >= MAX_FRUITLESS_IN_ALL

    def blamed(self, seat: int) -> set[str]:
        """Jobs suspected of its deaths since its last picture: not theirs, if the device is at fault."""
        return set(self._of(seat).blamed)

    def verdict(self, seat: int, others: Iterable[int]) -> tuple[str, dict[str, int]] | None:
        """Why the device should leave the queue, with the numbers; None if it stays. `others`: the seats that would go on.

        One that fails leaves only where another has not failed so; all alike is no device's fault.
        """
        device, rest = self._of(seat), [self._of(other) for other in others]
        if device.barren >= MAX_BARREN and any(not other.barren for other in rest):
            return f"it failed {device.barren} times in a row before a batch began", {"failures": device.barren}
        if device.fruitless >= MAX_FRUITLESS and any(other.pictures and not other.fruitless for other in rest):
            return f"it failed {device.fruitless} times in a row with nothing rendered between", {"failures": device.fruitless}
        if device.slow >= SLOW_BATCHES and any(other.pictures for other in rest):
            text = f"{device.slow} batches in a row took more than {SLOWER:g} times what they took before, and what they take elsewhere"
            return text, {"batches": device.slow}
        return None
