"""Does a worker grow over the night? A straight line through its memory samples, and the mark beyond which it is replaced."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.events import MemorySample
from batchgen.units import GIB

_SETTLED_WINDOWS = 2  # loading, caches and the first shapes are over by then
_GROWTH_FACTOR = 1.5
_GROWTH_BYTES = 4 * GIB
_ENOUGH_SAMPLES = 5
_ENOUGH_SECONDS = 600.0  # over less, an allocator's first hundred megabytes look like gigabytes an hour


@dataclass(slots=True)
class MemoryWatch:
    """One worker's memory since it settled. Mutable; sums only, so that a night of samples takes no room."""

    limit_bytes: int | None = None  # the user's mark; None: half as much again as when settled, and at least 4 GiB more
    windows: int = 0
    settled_bytes: int | None = None
    rss_bytes: int = 0
    rss_peak_bytes: int = 0
    device_bytes: int = 0
    device_peak_bytes: int = 0
    samples: int = 0
    _t: float = 0.0
    _y: float = 0.0
    _tt: float = 0.0
    _ty: float = 0.0
    _began: float | None = None
    _span: float = 0.0  # seconds from the first settled sample to the last

    def sample(self, event: MemorySample, seconds: float) -> None:
        """Takes one sample; `seconds` on any steady clock."""
        self.rss_bytes = event.rss_bytes
        self.rss_peak_bytes = max(self.rss_peak_bytes, event.rss_bytes)
        self.device_bytes = event.device_bytes
        self.device_peak_bytes = max(self.device_peak_bytes, event.device_peak_bytes)
        if self.windows < _SETTLED_WINDOWS:
            return
        if self._began is None:
            self._began = seconds
        t, y = seconds - self._began, float(event.rss_bytes)
        self._span = t
        self.samples += 1
        self._t += t
        self._y += y
        self._tt += t * t
        self._ty += t * y

    def window_done(self) -> None:
        self.windows += 1
        if self.windows == _SETTLED_WINDOWS:
            self.settled_bytes = self.rss_bytes

    @property
    def watermark_bytes(self) -> int | None:
        """None while nothing is known to measure growth by."""
        if self.limit_bytes is not None:
            return self.limit_bytes
        if not self.settled_bytes:
            return None
        return max(int(self.settled_bytes * _GROWTH_FACTOR), self.settled_bytes + _GROWTH_BYTES)

    @property
    def outgrown(self) -> bool:
        """A worker that is above the mark as soon as it has settled would be above it again: it is left alone."""
        mark = self.watermark_bytes
        if mark is None or self.rss_bytes <= mark or self.windows < _SETTLED_WINDOWS:
            return False
        return self.settled_bytes is None or self.settled_bytes <= mark

    @property
    def slope_bytes_per_hour(self) -> float | None:
        """Least-squares growth of resident memory; None before enough samples over enough time."""
        spread = self.samples * self._tt - self._t * self._t
        if self.samples < _ENOUGH_SAMPLES or self._span < _ENOUGH_SECONDS or spread <= 0:
            return None
        return 3600 * (self.samples * self._ty - self._t * self._y) / spread
