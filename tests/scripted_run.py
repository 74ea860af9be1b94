"""A whole run with the scripted engine as one process that tests can kill: `python scripted_run.py SPEC.json`.

SPEC: folder, jobs (count or list of ids), script, and any of fields (of every job), workers, batch_size, window, hang_seconds, retry_failed, verify,
overwrite, mode, max_hours, max_worker_bytes, factory. Exits as the command line does; prints the result as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from batchgen.errors import BatchgenError
from batchgen.execute.settings import EngineSettings, OutputSettings
from batchgen.execute.supervisor import RunRequest, RunResult, run_jobs
from batchgen.inventory.records import DeviceFacts
from batchgen.jobs import Job, job_key, row_hash, seed_from_row
from batchgen.plan.records import Plan
from batchgen.plan.trail import Trail
from batchgen.reconcile import open_journal
from batchgen.runfolder import RunFolder


def make_job(name: str, index: int, *, revision: str = "r1", **fields: Any) -> Job:
    """A job of row `index` whose identity is its name and fields."""
    row = row_hash({"prompt": name, **fields})
    shape = {"width": 32, "height": 32, "steps": 4} | fields
    return Job(
        key=job_key(row, 0, 0, revision, shape), index=index, row=index + 2, k=0, id=name, prompt=f"a picture of {name}",
        negative_prompt=None, seed=seed_from_row(row, 0), seed_source="identity", output=f"{index:06d}-{name}.png", **shape,
    )


def make_jobs(names: int | list[str], **fields: Any) -> list[Job]:
    names = [f"job{number}" for number in range(names)] if isinstance(names, int) else names
    return [make_job(name, index, **fields) for index, name in enumerate(names)]


def make_plan(batch_size: int | None = 1, window: int | None = None) -> Plan:
    device = DeviceFacts("CPU", "cpu", 2**33, 2**33)
    return Plan("auto", "cpu", (device,), False, False, 1, None, "global", (), batch_size, Trail(()), window=window)


def engine_settings(folder: RunFolder, script: dict[str, Any], *, overwrite: bool = False) -> EngineSettings:
    outputs = OutputSettings(str(folder.outputs), metadata=(("model", "scripted"), ("revision", "r1")), overwrite=overwrite)
    return EngineSettings("", (), (), "cpu", str(folder.path), outputs, extra=(("script", json.dumps(script)),))


def run(spec: dict[str, Any]) -> RunResult:
    folder = RunFolder(Path(spec["folder"]))
    events = Path(spec["events"]).open("a", encoding="utf-8") if "events" in spec else None  # noqa: SIM115 until the process ends
    with folder.lock():
        journal, _ = open_journal(folder, mode=spec.get("mode"))
        with journal:
            journal.ingest(make_jobs(spec["jobs"], **spec.get("fields", {})))
            request = RunRequest(
                folder, journal, engine_settings(folder, spec.get("script", {}), overwrite=spec.get("overwrite", False)),
                make_plan(spec.get("batch_size", 1), spec.get("window")), workers=spec.get("workers", 1),
                hang_seconds=spec.get("hang_seconds", 3600), retry_failed=spec.get("retry_failed", False), verify=spec.get("verify", False),
                max_hours=spec.get("max_hours"), max_worker_bytes=spec.get("max_worker_bytes"),
                factory=spec.get("factory", "scripted:ScriptedEngine"),
            )
            return run_jobs(request, (lambda event: print(event, file=events, flush=True)) if events else (lambda event: None))


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    try:
        result = run(spec)
    except BatchgenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps({"counts": result.counts, "rendered": result.rendered, "deaths": result.deaths, "stopped_by": result.stopped_by}))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
