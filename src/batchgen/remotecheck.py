"""What a resume, and `verify`, do where the outputs are in a store: hold the journal against what the store says it has.

One listing gives the sizes of all; only what is in doubt is asked for singly, and read only where the store keeps no hash of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from batchgen.errors import RefusedError
from batchgen.events import JobFailed, OutputDone
from batchgen.journal import Journal
from batchgen.outputs.delivery import OUTPUTS, Delivery, remote_name
from batchgen.outputs.files import disk_errors, sweep
from batchgen.outputs.names import name_key
from batchgen.outputs.store import Store
from batchgen.outputs.whole import judge
from batchgen.reconcile import Reconciled, adoption, check_done, clear
from batchgen.runfolder import RunFolder
from batchgen.verify import Aside, Finding, Tally, going_on, unowned

_SHOWN = 10


def reconcile_remote(
    folder: RunFolder, journal: Journal, delivery: Delivery, *, after_crash: bool, verify: bool = False, overwrite: bool = False
) -> Reconciled:
    """As `reconcile`, of outputs in a store. Files that were finished and had not gone yet are sent.

    Raises RefusedError where foreign objects stand under planned names (unless `overwrite`), StoreError, DiskError.
    """
    found = Reconciled()
    with disk_errors(folder.outputs):
        journal.release()
        if after_crash:
            found.swept = sweep(folder.path)
        there = delivery.store.sizes(OUTPUTS)
        check_done(
            journal, found, after_crash=after_crash, verify=verify,
            size_there=there.get, hash_there=lambda output: _hash(delivery.store, output),
        )
        _send_staged(folder, journal, delivery, found)
        _check_pending(journal, delivery, there, found, overwrite)
    return found


def _hash(store: Store, output: str) -> str | None:
    """By the uploader's note beside the object, which the store took together with it; by reading it where there is none."""
    known = store.stat(remote_name(output))
    if known is not None and known.sha256 is not None:
        return known.sha256
    measured = store.measure(remote_name(output))
    return None if measured is None else measured[1]


def _send_staged(folder: RunFolder, journal: Journal, delivery: Delivery, found: Reconciled) -> None:
    """Files that a killed run had finished on the disk."""
    sent: list[OutputDone | JobFailed] = []
    for row in list(journal.known("pending")):
        path = folder.outputs / row.output
        verdict, settings = judge(path, row.key)
        if verdict == "ours" and settings is not None:
            sent.append(delivery.send(adoption(path, row.key, row.output, settings)))
        elif verdict != "absent":
            clear(folder, path, row.output, found)
    journal.record(sent)
    found.adopted += [event.path for event in sent if isinstance(event, OutputDone)]


def _check_pending(journal: Journal, delivery: Delivery, there: dict[str, int], found: Reconciled, overwrite: bool) -> None:
    foreign: list[str] = []
    adopted: list[OutputDone] = []
    redone = set(found.redone)
    for row in [row for row in journal.known("pending") if row.output in there]:
        verdict, event = delivery.judge(row.output, row.key)
        if event is not None and row.output not in redone:
            adopted.append(event)
        elif verdict == "foreign" and row.output not in redone and not overwrite:
            foreign.append(row.output)
    if foreign:
        shown = "\n".join(f"  {delivery.store.shown}/{remote_name(name)}" for name in foreign[:_SHOWN])
        more = f"\n  ... and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        raise RefusedError(
            f"{len(foreign)} objects stand where pictures of this run would go, and are not batchgen's for these jobs:\n{shown}{more}",
            hint="Move them away, use --overwrite to replace them, or --new to start beside this place.",
        )
    journal.record(adopted)
    found.adopted = sorted({*found.adopted, *(event.path for event in adopted)})


def verify_remote(folder: RunFolder, store: Store, journal: Journal, tally: Tally) -> Iterator[Finding]:
    """As `verify`, of outputs in a store, `folder` holding the run's state: each is read. Raises StoreError."""
    tally.going_on = going_on(folder)
    there = store.sizes(OUTPUTS)
    owned: set[str] = set()
    for row in journal.finished():
        tally.checked += 1
        owned.add(name_key(row.output))
        size = there.get(row.output)
        measured = store.measure(remote_name(row.output)) if size == row.size_bytes else None
        if size is None:
            yield Finding("missing", row.output, "the journal says done, and there is no such object")
        elif measured is None:
            yield Finding("changed", row.output, f"{size} bytes, the journal says {row.size_bytes}")
        elif measured[1] != row.sha256:
            text = f"the bytes are others: sha256 {measured[1][:12]}…, the journal says {str(row.sha256)[:12]}…"
            yield Finding("changed", row.output, text)
        else:
            tally.size_bytes += row.size_bytes or 0
    aside = Aside.of(journal, owned)
    shard = (folder.read_run() or {}).get("shard") is not None  # others have the same address, and this journal does not know their names
    for name in sorted(there):
        if name_key(name) in owned or aside.counts(name_key(name), tally):
            continue
        finding = unowned(name, journal, tally)
        if finding is not None and shard:
            tally.others += 1
        elif finding is not None:
            yield finding
