"""How far a run is, from its folder alone: the journal, the lock and the clock. Also while the run goes on."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from batchgen.errors import RunStoppedError
from batchgen.journal import Journal
from batchgen.report.safe import printable
from batchgen.report.sheet import Column, Sheet
from batchgen.runfolder import RunFolder
from batchgen.runlock import heartbeat_age, is_alive, read_holder
from batchgen.units import counted, duration_text, size_text

_RATE_SECONDS = 900.0  # a rate over the last quarter of an hour: models of several shapes do not run evenly
_SHOWN_REASONS = 15
_REFUSALS = frozenset({"RefusedError", "UsageError", "SettingsError", "ModelError", "ManifestError", "PlanRefusedError"})
_ERRORS = {
    "DiskError": "the disk", "StoreError": "the store of the outputs", "WorkerLostError": "no worker left", "RunLockedError": "the lock",
    "LeaseLostError": "another run at its address",
}


def collect(folder: RunFolder, *, now: float | None = None) -> dict[str, Any]:
    """One plain object, as `status --json` prints it. Raises RefusedError where there is no journal."""
    now = time.time() if now is None else now
    with Journal.read(folder.journal) as journal, journal.snapshot():
        counts = journal.counts()
        runs = journal.runs()
        last = runs[-1] if runs else None
        holder = read_holder(folder.lock_path)
        alive = holder is not None and is_alive(folder.lock_path, holder)
        left = counts["pending"] + counts["running"]
        if not alive:  # what was in flight when a run ended without a word waits for the next
            counts |= {"pending": left, "running": 0}
        stopped_by, _, because = ("" if alive or last is None else last["stopped_by"] or "").partition(": ")
        rate = _rate(journal, last, now if alive else None)
        return {
            "schema": 1,
            "folder": str(folder.path),
            "state": _state(last, alive=alive, left=left),
            "stopped_by": stopped_by or None,
            "stopped_because": because or None,
            "holder": holder.text if holder is not None and alive else None,
            "heartbeat_seconds": heartbeat_age(folder.lock_path) if alive else None,
            "jobs": sum(count for state, count in counts.items() if state != "vanished"),
            "counts": counts,
            "skipped_rows": len(journal.skipped()),
            "limit": _limit(folder),
            "shard": _shard(folder),
            "rate_per_minute": rate,
            "eta_seconds": 60 * left / rate if rate and left and alive else None,
            "last_output_at": journal.last_written(),
            "runs": len(runs),
            "failures": [asdict(group) for group in journal.failures_by_reason()],
            "workers": [_worker(row, now) for row in journal.workers()] if alive else [],
        }


def _limit(folder: RunFolder) -> int | None:
    """The rows that --limit let through in the last run; None where all were taken."""
    try:
        value = (folder.read_run() or {}).get("settings", {}).get("limit", {}).get("value")
    except RunStoppedError:
        return None
    return value if isinstance(value, int) else None


def _shard(folder: RunFolder) -> str | None:
    """The share of the jobs that this folder holds, as `2/3`; None where it holds all."""
    try:
        value = (folder.read_run() or {}).get("shard")
    except RunStoppedError:
        return None
    return value if isinstance(value, str) else None


def _state(last: dict[str, Any] | None, *, alive: bool, left: int) -> str:
    """`running`, `finished`, `stopped` (in good order, jobs left), `crashed` (ended without a word), or `new`."""
    if alive:
        return "running"
    if last is None:
        return "new"
    if last["ended"] is None:
        return "crashed"
    return "stopped" if left else "finished"


def _rate(journal: Journal, last: dict[str, Any] | None, now: float | None) -> float | None:
    """Rendered outputs a minute: lately where a run goes on, over the whole of the last run where none does. None without any."""
    if last is None:
        return None
    end = now if now is not None else last["ended"] or journal.last_written()
    if end is None:
        return None
    since = max(last["started"], end - _RATE_SECONDS) if now is not None else last["started"]
    made = journal.made_since(since, end)
    return 60 * made / (end - since) if made and end > since else None


def _worker(row: dict[str, Any], now: float) -> dict[str, Any]:
    names = ("worker", "pid", "device", "state", "window", "stage", "jobs", "rss_bytes", "device_bytes", "device_peak_bytes",
             "slope_bytes_per_hour", "deaths")
    return {name: row[name] for name in names} | {"seconds": round(max(0.0, now - row["since"]), 1)}


def render(status: dict[str, Any]) -> RenderableType:
    """The same for people."""
    counts = status["counts"]
    parts: list[RenderableType] = [Text(_headline(status), style="bold"), _counts_table(counts)]
    if status["failures"]:
        parts += [Text(), _failures_table(status["failures"])]
    if status["skipped_rows"]:
        rows = counted(status["skipped_rows"], "row of the manifest was", "rows of the manifest were")
        parts.append(Text(f"{rows} invalid and skipped"))
    if status["limit"] is not None:
        parts.append(Text(f"--limit {status['limit']}: later rows of the manifest are not counted; run without it to render them"))
    if status["shard"] is not None:
        parts.append(Text(f"shard {status['shard']} of the manifest's jobs; `batchgen merge` joins all shards"))
    if status["workers"]:
        parts += [Text(), _workers_table(status["workers"])]
    return Group(*parts)


def _headline(status: dict[str, Any]) -> str:
    counts = status["counts"]
    refused = status["state"] == "stopped" and status["stopped_by"] in _REFUSALS
    words = {
        "running": "running",
        "finished": "finished",
        "stopped": _stopped(status["stopped_by"]),
        "crashed": "ended without a word (crash, power cut or full disk)",
        "new": "not begun",
    }
    line = f"{words[status['state']]}: {counts['done']} of {status['jobs']} done"
    if status["rate_per_minute"]:
        line += f", {status['rate_per_minute']:.1f} a minute"
    if status["eta_seconds"] is not None:
        line += f", about {duration_text(status['eta_seconds'])} left"
    if status["holder"]:
        line += f"\n{status['holder']}"
    if status.get("stopped_because"):
        line += f"\n{printable(status['stopped_because'], keep=chr(10))}"
    if status["state"] == "crashed" or (status["state"] == "stopped" and not refused):
        line += "\nThe same `batchgen run` command goes on from here."
    return line


def _stopped(by: str | None) -> str:
    """What stopped a run, in words: the journal keeps an error's class."""
    if by is None or not by.endswith("Error"):
        return f"stopped ({by})" if by else "stopped"
    return "refused" if by in _REFUSALS else f"stopped ({_ERRORS.get(by, 'an error')})"


def _counts_table(counts: dict[str, int]) -> Sheet:
    table = Sheet("", [Column(name, "number", keep=0 if name == "done" else 1 if name == "failed" else 2) for name in counts])
    table.add(*counts.values())
    return table


def _failures_table(failures: list[dict[str, Any]]) -> Sheet:
    table = Sheet("Failures", (
        Column("jobs", "number"), Column("kind"), Column("stage", label="in"), Column("reason", "text", label=""),
        Column("for example", "text"),
    ))
    for group in failures[:_SHOWN_REASONS]:
        table.add(group["count"], group["kind"] or group["state"], group["stage"], group["reason"], ", ".join(group["examples"]))
    if len(failures) > _SHOWN_REASONS:
        table.add(sum(group["count"] for group in failures[_SHOWN_REASONS:]), "…", "", "for other reasons", "")
    return table


def _workers_table(workers: list[dict[str, Any]]) -> Sheet:
    table = Sheet("Workers", (
        Column("worker", "number"), Column("pid", "number", 9), Column("device"), Column("state"), Column("stage"),
        Column("jobs", "number"), Column("memory", "number", 6), Column("growth/h", "number", 8), Column("deaths", "number", 7),
    ))
    for row in workers:
        memory = size_text(row["rss_bytes"]) if row["rss_bytes"] else ""
        growth = size_text(round(row["slope_bytes_per_hour"])) if row["slope_bytes_per_hour"] is not None else ""
        table.add(
            row["worker"], row["pid"], row["device"] or "", row["state"], row["stage"] or "", row["jobs"], memory, growth, row["deaths"],
        )
    return table
