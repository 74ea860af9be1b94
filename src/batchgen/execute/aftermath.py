"""What a worker leaves behind when it dies: half-written files, and jobs of its window that nobody has spoken for.

A file that was finished is its job's, told or not; of the rest only the batch in flight is suspected.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from batchgen.events import Event, FailureKind, JobFailed, WorkerDied
from batchgen.execute.seats import Seat
from batchgen.journal import Journal
from batchgen.outputs.delivery import Delivery
from batchgen.outputs.files import sweep_after
from batchgen.outputs.whole import judge
from batchgen.reconcile import adoption
from batchgen.runfolder import RunFolder


def sweep_files(seat: Seat, folder: RunFolder, journal: Journal) -> None:
    """Removes the dead worker's temp files from the folders that its jobs write to."""
    if seat.process.place:
        return  # another machine's number may be that of a worker here; the next run sweeps
    sweep_after(seat.process.pid, {(folder.outputs / journal.job(key).output).parent for key in seat.held})


def outcomes(
    held: Collection[str], death: WorkerDied, kind: FailureKind, *, folder: RunFolder, journal: Journal, delivery: Delivery | None,
) -> list[Event]:
    """One event for each of the `held` jobs whose fate is known: finished before the end, or suspected of it.

    The others may be given out anew.
    """
    reason = f"worker {death.cause}, in stage {death.stage or 'unknown'}"
    events: list[Event] = []
    for key in sorted(held):
        output = journal.job(key).output
        verdict, settings = judge(folder.outputs / output, key)
        if verdict == "ours" and settings is not None:
            events.append(adoption(folder.outputs / output, key, output, settings, death.worker))  # renamed, but not told
        elif delivery is not None and (there := delivery.judge(output, key)[1]) is not None:
            events.append(replace(there, worker=death.worker))  # sent, but not told
        elif key in death.keys:
            events.append(JobFailed(death.worker, key, kind, death.stage, reason, True))
    return events
