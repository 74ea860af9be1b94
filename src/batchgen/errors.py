"""Every error batchgen raises on purpose, and the exit code each one means.

Imports nothing from the package. Only `cli` turns an error into an exit; all other code raises and lets it pass.
A message says what was asked, what was needed, what there is, and which option to change. Numbers that a caller may want
again are fields of the exception as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_STOPPED = 1
EXIT_REFUSED = 2
EXIT_SOME_FAILED = 3
EXIT_SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}


class BatchgenError(Exception):
    """Base of all errors with a message meant for the user. `hint` is the one thing to do about it."""

    exit_code = EXIT_STOPPED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class RefusedError(BatchgenError):
    """Wrong usage, manifest, model or plan: found before a model is touched."""

    exit_code = EXIT_REFUSED


class UsageError(RefusedError):
    """An option or a combination of options that cannot be carried out. `option` is the flag to change."""

    def __init__(self, message: str, *, option: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.option = option


class SettingsError(RefusedError):
    """A settings file or environment variable with an unknown key or a wrong value."""


class ModelError(RefusedError):
    """The model folder or hub id cannot be used: not found, not a pipeline, incomplete, or needs consent."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a manifest, where it stands and what to do."""

    file: str
    row: int | None  # as an editor counts lines, from 1; None for the whole file
    column: str | None
    value: str | None
    message: str
    fix: str
    kind: str  # a stable word for counting: "number", "range", "unknown-column", ...
    item: int | None = None  # which element of a JSON array, from 1: several may stand on one line

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.row, self.column) if part is not None)
        item = f"item {self.item}: " if self.item is not None else ""
        value = f" ({self.value!r})" if self.value is not None else ""
        return f"{where}: {item}{self.message}{value}; {self.fix}"


class ManifestError(RefusedError):
    """A manifest with faults. All of them are in `faults`, in file order; the text shows the first fifty."""

    SHOWN = 50

    def __init__(self, faults: Sequence[Fault], *, total: int | None = None, counts: Mapping[str, int] | None = None) -> None:
        """`total` and `counts` (by kind) count those too that are not among `faults`, of a file with very many."""
        self.faults = tuple(faults)
        self.total = len(self.faults) if total is None else total
        shown = [str(fault) for fault in self.faults[: self.SHOWN]]
        if self.total > len(shown):
            kinds: dict[str, int] = dict(counts or {})
            for fault in self.faults if counts is None else ():
                kinds[fault.kind] = kinds.get(fault.kind, 0) + 1
            by_kind = ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))
            shown.append(f"... and {self.total - len(shown)} more faults (in all, {by_kind})")
        super().__init__("\n".join(shown), hint="--faults-file FILE writes them all down" if self.total > self.SHOWN else None)


class PlanRefusedError(RefusedError):
    """No plan fits. Sizes in bytes; `largest_that_fits` describes what would."""

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, available_bytes: int | None = None,
        largest_that_fits: str | None = None, option: str | None = None, hint: str | None = None, stage: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.largest_that_fits = largest_that_fits
        self.stage = stage  # the one that needs most
        self.option = option


class RunStoppedError(BatchgenError):
    """The run cannot go on; what is done is kept and the same command resumes it."""


class DiskError(RunStoppedError):
    """The output or spool folder's disk is full, over quota or read-only."""


class StoreError(RunStoppedError):
    """The store that takes the outputs does not answer, or refuses."""


class RunLockedError(RunStoppedError):
    """Another run holds the folder. `holder` says who."""

    def __init__(self, message: str, *, holder: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class LeaseHeldError(RefusedError):
    """Another run, perhaps of another machine, writes to the address. `holder` says who."""

    def __init__(self, message: str, *, holder: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class LeaseLostError(RunStoppedError):
    """Another run has taken the address over; what is done is kept. `holder` says who."""

    def __init__(self, message: str, *, holder: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class WorkerLostError(RunStoppedError):
    """No worker lives and none can be started."""


class InterruptedRunError(BatchgenError):
    """Stopped by a signal after the batch in flight was finished; resumable."""

    def __init__(self, signal_name: str, message: str) -> None:
        super().__init__(message)
        self.signal_name = signal_name
        self.exit_code = EXIT_SIGNALS[signal_name]
