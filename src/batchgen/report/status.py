"""How far a run is, from its folder alone: the journal, the lock and the clock. Also while the run goes on."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchgen.errors import RunStoppedError
from batchgen.journal import Journal
from batchgen.runfolder import RunFolder
from batchgen.runlock import heartbeat_age, is_alive, read_holder
from batchgen.units import duration_text, size_text

_RATE_SECONDS = 900.0  # a rate over the last quarter of an hour: models of several shapes do not run evenly
_SHOWN_REASONS = 15


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
        rate = _rate(journal, last, now if alive else None)
        return {
            "schema": 1,
            "folder": str(folder.path),
            "state": _state(last, alive=alive, left=left),
            "stopped_by": None if alive or last is None else last["stopped_by"],
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
    """Outputs a minute: lately where a run goes on, over the whole of the last run where none does."""
    if last is None:
        return None
    end = now if now is not None else last["ended"] or journal.last_written()
    if end is None:
        return None
    since = max(last["started"], end - _RATE_SECONDS) if now is not None else last["started"]
    made = journal.done_since(since)
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
        parts.append(_failures_table(status["failures"]))
    if status["skipped_rows"]:
        parts.append(Text(f"{status['skipped_rows']} rows of the manifest were invalid and skipped"))
    if status["limit"] is not None:
        parts.append(Text(f"--limit {status['limit']}: later rows of the manifest are not counted; run without it to render them"))
    if status["shard"] is not None:
        parts.append(Text(f"shard {status['shard']} of the manifest's jobs; `batchgen merge` joins all shards"))
    if status["workers"]:
        parts.append(_workers_table(status["workers"]))
    return Group(*parts)


def _headline(status: dict[str, Any]) -> str:
    counts = status["counts"]
    words = {
        "running": "running",
        "finished": "finished",
        "stopped": f"stopped ({status['stopped_by']})" if status["stopped_by"] else "stopped",
        "crashed": "ended without a word (crash or power cut)",
        "new": "not begun",
    }
    line = f"{words[status['state']]}: {counts['done']} of {status['jobs']} done"
    if status["rate_per_minute"]:
        line += f", {status['rate_per_minute']:.1f} a minute"
    if status["eta_seconds"] is not None:
        line += f", about {duration_text(status['eta_seconds'])} left"
    if status["holder"]:
        line += f"\n{status['holder']}"
    elif status["state"] in ("stopped", "crashed"):
        line += "\nThe same `batchgen run` command goes on from here."
    return line


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(show_edge=False, pad_edge=False, box=None, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _counts_table(counts: dict[str, int]) -> Table:
    table = _table(*counts, right=tuple(counts))
    table.add_row(*(str(count) for count in counts.values()))
    return table


def _failures_table(failures: list[dict[str, Any]]) -> Table:
    table = _table("jobs", "kind", "stage", "reason", "for example", right=("jobs",))
    for group in failures[:_SHOWN_REASONS]:
        # Text: a reason or an id may hold brackets, which are no markup of ours.
        cells = (group["kind"] or group["state"], group["stage"], group["reason"], ", ".join(group["examples"]))
        table.add_row(str(group["count"]), *(Text(_plain(cell)) for cell in cells))
    if len(failures) > _SHOWN_REASONS:
        table.add_row(str(sum(group["count"] for group in failures[_SHOWN_REASONS:])), Text("for other reasons"))
    return table


def _workers_table(workers: list[dict[str, Any]]) -> Table:
    table = _table("worker", "pid", "device", "state", "stage", "jobs", "memory", "growth/h", "deaths", right=("jobs", "memory", "deaths"))
    for row in workers:
        memory = size_text(row["rss_bytes"]) if row["rss_bytes"] else ""
        growth = size_text(round(row["slope_bytes_per_hour"])) if row["slope_bytes_per_hour"] is not None else ""
        words = (row["device"] or "", row["state"], row["stage"] or "", str(row["jobs"]), memory, growth, str(row["deaths"]))
        table.add_row(str(row["worker"]), str(row["pid"]), *words)
    return table


def _plain(text: str) -> str:
    """Without control characters: reasons quote models and manifests, and a terminal must not obey them."""
    return "".join(char if char.isprintable() else " " for char in text)
