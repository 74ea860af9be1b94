"""A run from options to tables, shared by `run` and `demo`: facts, plan, manifest, run folder, journal, workers, tables.

Order matters: everything that can be refused is refused before anything is written, and the folder is locked before it is looked into.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from batchgen import __version__, manifest
from batchgen.checkpoints import Checkpoints, records_below
from batchgen.cli.check import manifest_file
from batchgen.cli.engines import Workplace, workplace
from batchgen.cli.finishing import finish, learn_from, print_tables
from batchgen.cli.fitting import Shapes, adapted, rehearse_and_fit
from batchgen.cli.places import held, run_place
from batchgen.cli.request import (
    Facts,
    RenderRequest,
    cpu_ranks,
    default_folder,
    engine_settings,
    manifest_options,
    pixel_settings,
    run_record,
    worker_count,
)
from batchgen.cli.run_options import RunOptions
from batchgen.errors import EXIT_DONE, EXIT_SOME_FAILED, BatchgenError, PlanRefusedError, RefusedError, UsageError
from batchgen.events import Event, WindowDone, event_line
from batchgen.execute.process import WorkerProcess, prewarm
from batchgen.execute.stopping import next_time
from batchgen.execute.supervisor import HANG_SECONDS, RunRequest, RunResult, run_jobs
from batchgen.inventory import model
from batchgen.inventory.host import host_memory
from batchgen.inventory.model import ModelOptions
from batchgen.inventory.profiles import find_profile
from batchgen.inventory.records import DeviceFacts, ModelFacts, Profile
from batchgen.jobs import Job, ShapeKey, largest_jobs
from batchgen.journal import Journal
from batchgen.lease import Lease
from batchgen.manifest.options import ManifestOptions
from batchgen.outputs.delivery import Delivery
from batchgen.outputs.files import disk_errors
from batchgen.outputs.store import Store
from batchgen.plan.fit import FitOptions
from batchgen.plan.planner import make_plan
from batchgen.plan.records import PlanFacts
from batchgen.plan.trail import Decision
from batchgen.reconcile import begin_anew, nothing_rendered, open_journal, space
from batchgen.report.plan_tables import trail_table
from batchgen.report.progress import Display, DownloadLines, Pace, open_display
from batchgen.report.safe import printable
from batchgen.report.summary import Summary
from batchgen.runfolder import RunFolder
from batchgen.shards import Shard
from batchgen.units import counted, size_text

SMALL_SHARE = 8  # on the CPU: a model whose weights fit this many times is not rehearsed
SMALL_PIXELS = 2**22  # ... unless a job of the list is larger than this: then its activations decide
MOST_PIXELS = 2**28  # of one picture or all frames of a clip together; more is a slip of the pen on any device


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that came to its end, with jobs failed or left or not."""

    folder: RunFolder
    result: RunResult
    summary: Summary
    facts: Facts
    skipped_rows: int  # of the manifest, with faults

    @property
    def exit_code(self) -> int:
        """The run's own; rows that were left out count as failed."""
        return EXIT_SOME_FAILED if self.skipped_rows and self.result.exit_code == EXIT_DONE else self.result.exit_code


def render(request: RenderRequest, worker: WorkerProcess | None = None) -> Outcome:
    """Carries a run out and prints its tables. Raises BatchgenError for all that stops it; the tables are written even then.

    `worker`: one that was started before this module was loaded, so that its imports overlap ours.
    """
    run = request.run
    with ExitStack() as stack:
        if run.engine == "local":
            worker = stack.enter_context(_ended_on_error(worker or prewarm()))
        folder_path, store = run_place(run, default_folder(request.manifest, request.model, run.shard))
        remote = store.location if store is not None else None
        note = _notes(request.run)
        lease = stack.enter_context(held(folder_path, store, run, note)) if store is not None else None
        request = replace(request, model_options=_same_revision(request, folder_path))
        place = stack.enter_context(workplace(run))
        facts = gather(request, place)
        if store is not None and facts.profile.task == "video" and run.video_format == "png":
            raise UsageError("a folder of frames cannot go to a URL whole", option="--video-format", hint="Use mp4 or webp.")
        options = manifest_options(request, facts)
        path, shown = stack.enter_context(manifest_file(request.manifest, options.format))
        options = replace(options, shown_as=shown)
        checked = manifest.check(path, options)
        events = stack.enter_context(_events_file(request.run.events)) if request.run.events else None
        for line in (*facts.model.notes, *map(str, checked.warnings)):
            note(line)
        if store is not None and store.warning is not None:
            note(store.warning)
        facts = fitted(request, facts, checked, note, place)
        folder = RunFolder.open(folder_path, manifest_path=_kept(request.manifest, path, folder_path), new=run.new and store is None)
        pixels = pixel_settings(request, facts)
        refused = _other_settings(folder, checked.kind, pixels)
        if refused is not None and (store is not None or not nothing_rendered(folder)):
            raise refused
        folder.check_remote(None if remote is None else remote.shown)
        folder.check_shard(None if run.shard is None else str(run.shard))
        if lease is None:
            stack.enter_context(folder.lock())
        if refused is not None:
            if not nothing_rendered(folder):  # another run has been here since
                raise refused
            begin_anew(folder)
            note(f"{folder.path} was begun with other settings and nothing was rendered: it begins anew")
        folder.prepare()
        if request.manifest == "-" and folder.manifest is not None:
            shutil.copyfile(path, folder.manifest)
            path = str(folder.manifest)
        journal, _ = open_journal(folder)
        stack.enter_context(journal)
        if journal.damaged is not None:
            note(f"the journal was damaged; it is kept as {journal.damaged.name}, and finished outputs are found by themselves")
        merged = (folder.read_run() or {}).get("merged")  # kept, so that shards can be merged in after a run of the whole
        own = {"manifest_kind": checked.kind} | ({} if merged is None else {"merged": merged})
        folder.write_run(run_record(request, facts, pixels, remote) | own)
        taken = journal.ingest(_jobs(path, options, run.shard), complete=run.limit is None, mark=_mark(path, options, run.shard))
        journal.set_skipped((row.row, None, row.reason) for row in checked.skipped)
        if taken.vanished:
            gone = counted(taken.vanished, "job of an earlier manifest is", "jobs of an earlier manifest are")
            note(f"{gone} no longer in it; what was rendered is kept")
        room = space(folder, journal, image_format=request.run.image_format, video_format=request.run.video_format)
        if room.warning is not None and store is None:
            note(room.warning)
        trial = largest_jobs(_jobs(path, options, run.shard)) if run.smoke else ()
        return _carry_out(request, facts, folder, journal, place, worker, events, trial, store, lease)


def _other_settings(folder: RunFolder, kind: str, pixels: Mapping[str, object]) -> RefusedError | None:
    """Why what was rendered in the folder, if anything was, keeps this run from going on in it."""
    try:
        folder.check_kind(kind)
        folder.check_pixel_settings(pixels)
    except RefusedError as refused:
        return refused
    return None


def _jobs(path: str, options: ManifestOptions, shard: Shard | None) -> Iterator[Job]:
    """The jobs of this run. Names were given over the whole manifest, so that shards never share one."""
    jobs = manifest.jobs(path, options)
    return jobs if shard is None else shard.of(jobs)


def _mark(path: str, options: ManifestOptions, shard: Shard | None) -> str | None:
    """What the jobs are made from: the manifest's bytes, the options, the version that reads them. None for a folder of prompts."""
    if not Path(path).is_file():
        return None
    plain = replace(options, shown_as=None, faults_file=None, one_size=False)
    made_by = asdict(plain) | {"version": __version__, "path": str(Path(path).absolute())}
    if shard is not None:
        made_by["shard"] = str(shard)
    text = json.dumps(made_by, default=sorted, sort_keys=True)  # sorted: for sets, whose order differs from run to run
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()} {hashlib.sha256(text.encode()).hexdigest()}"


def gather(request: RenderRequest, place: Workplace) -> Facts:
    """Devices, model, profile and plan. Raises ModelError, UsageError, PlanRefusedError."""
    platform = place.platform
    devices = cpu_ranks(request, platform, place.devices)
    found = model.resolve(
        request.model, request.model_options, platform=platform, on_progress=DownloadLines(request.model, quiet=request.run.quiet),
    )
    own = request.overrides.profile_file
    profile = find_profile(found, name=request.overrides.profile, file=Path(own) if own is not None else None)
    plan = make_plan(_plan_facts(request, place, found, profile, devices))
    return Facts(found, profile, platform, devices, plan)


def _plan_facts(
    request: RenderRequest, place: Workplace, found: ModelFacts, profile: Profile, devices: tuple[DeviceFacts, ...],
) -> PlanFacts:
    changed = adapted(request.manifest_options.loras, found)
    return PlanFacts(found, profile, place.platform, devices, request.overrides, place.largest_group, changed)


def fitted(
    request: RenderRequest, facts: Facts, checked: manifest.ManifestSummary, note: Callable[[str], None], place: Workplace,
) -> Facts:
    """The facts with the plan that fits the manifest's shapes. Raises PlanRefusedError.

    On the CPU a model far smaller than the memory is not rehearsed: no placement depends on it, and a rehearsal takes as long as loading.
    """
    plan, available = facts.plan, facts.plan.devices[0].available_bytes
    largest = max((_pixels(count.shape) for count in checked.shapes), default=0)
    if largest > MOST_PIXELS:
        what = next(count.shape.text for count in checked.shapes if _pixels(count.shape) == largest)
        raise PlanRefusedError(
            f"{what} is {largest:,} pixels, more than the {MOST_PIXELS:,} that one output may have",
            hint="Look for a slip in the width, height or frames; `batchgen check` lists the shapes.",
        )
    weights = sum(part.bytes_as_loaded or 0 for part in facts.model.components)
    if facts.platform == "cpu" and SMALL_SHARE * weights < available and largest <= SMALL_PIXELS:
        numbers = {"weights_bytes": weights, "available_bytes": available, "share": SMALL_SHARE}
        text = f"Not rehearsed: on the CPU {size_text(weights)} of weights are little beside {size_text(available)} of memory."
        return replace(facts, plan=replace(plan, trail=plan.trail.add([Decision.of("rehearsal", "plan", "no", text, numbers)])))
    host = host_memory()[1]
    options = FitOptions(
        reserve_bytes=request.run.reserve_device_bytes,
        host_available_bytes=host if request.run.host_memory_bytes is None else min(host, request.run.host_memory_bytes),
    )
    share = (lambda jobs: jobs) if request.run.shard is None else request.run.shard.share
    shapes = Shapes(tuple((count.shape, share(count.jobs)) for count in checked.shapes), prompt=checked.longest_prompt)
    planning = _plan_facts(request, place, facts.model, facts.profile, facts.devices)
    trusted = request.model_options.trust_remote_code
    loras = request.manifest_options.loras
    fitting = rehearse_and_fit(plan, planning, shapes, options, note=note, trust_remote_code=trusted, loras=loras)
    return replace(facts, plan=fitting)


def _pixels(shape: ShapeKey) -> int:
    """Of one output; a size left to the model counts as nothing."""
    return (shape.width or 0) * (shape.height or 0) * (shape.num_frames or 1)


def _same_revision(request: RenderRequest, folder_path: Path) -> ModelOptions:
    """A resume takes the commit that the run began with, though the hub or its cache may hold a newer one."""
    options = request.model_options
    if options.revision is not None or request.run.new or not (folder_path / "run.json").is_file():
        return options
    record = RunFolder(folder_path.absolute()).read_run() or {}
    began = record.get("model", {})
    if began.get("kind") == "hub" and began.get("source") == request.model and isinstance(began.get("revision"), str):
        return replace(options, revision=began["revision"])
    return options


@contextmanager
def _ended_on_error(worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """The early worker; ended if the run is refused."""
    try:
        yield worker
    except BaseException:
        worker.kill()
        raise


def _kept(given: str, path: str, folder: Path) -> str:
    """The manifest that the folder belongs to: its own copy, where it came on standard input."""
    return given if given != "-" else str(folder.absolute() / Path(path).name)


def _notes(run: RunOptions) -> Callable[[str], None]:
    def note(line: str) -> None:
        if not run.quiet:
            print(printable(line, keep="\n"), file=sys.stderr)

    return note


def _carry_out(
    request: RenderRequest, facts: Facts, folder: RunFolder, journal: Journal, place: Workplace, worker: WorkerProcess | None,
    events: TextIO | None, trial: Sequence[Job], store: Store | None, lease: Lease | None,
) -> Outcome:
    run = request.run
    counts = journal.counts()
    summary = Summary()
    total = sum(counts[state] for state in ("pending", "running", "done", "failed", "filtered"))
    settled = counts["failed"] + counts["filtered"]
    pace = Pace(total, done=counts["done"], failed=0 if run.retry_failed else settled, workers=worker_count(request, facts))
    if run.verbose:
        print_tables([trail_table(facts.plan)], sys.stderr)
    started = time.monotonic()
    checkpoints = Checkpoints(folder, store, below=records_below(run.shard)) if store is not None else None
    place_shown = f"{store.shown}/outputs\nstate: {folder.path}" if store is not None else str(folder.outputs)
    try:
        with ExitStack() as stack:
            display = stack.enter_context(open_display(pace, quiet=run.quiet))
            listen = _listener(summary, display, events, started)

            def recount(event: Event) -> None:
                listen(event)
                if isinstance(event, WindowDone):  # all it rendered has been told by now; what else differs was found on the disk
                    _rebase(pace, journal)
                    if checkpoints is not None and not _lost(lease):
                        checkpoints.maybe()

            def found(line: str) -> None:  # before the first window: outputs lost or adopted change what is left to do
                _rebase(pace, journal)
                display.note(line)

            asked = _request(request, facts, folder, journal, place, worker, trial, store)
            asked = replace(asked, say=found, withdrawn=lambda: None if lease is None else lease.lost)
            result = run_jobs(asked, recount)
            _rebase(pace, journal)
            for line in result.lines:
                display.note(line)
    except BatchgenError:
        with suppress(BatchgenError, OSError):  # what stopped the run, a full disk for one, may stop the tables too
            finish(folder, journal, facts.plan, summary, seconds=time.monotonic() - started, stream=sys.stdout, place=place_shown)
        if checkpoints is not None and not _lost(lease, look=True):
            with suppress(BatchgenError, OSError):
                checkpoints.finish()
        raise
    unread: BrokenPipeError | None = None
    try:
        finish(folder, journal, facts.plan, summary, seconds=result.seconds, stream=sys.stdout, place=place_shown)
    except BrokenPipeError as error:  # what remains to be done does not depend on a reader
        unread = error
    if checkpoints is not None and not _lost(lease, look=True):
        checkpoints.finish()
    learn_from(facts, summary)
    if result.stopped_by is not None:
        left = result.counts["pending"]
        rest = counted(left, "job is", "jobs are")
        print(f"stopped by --{result.stopped_by}; {rest} left. The same command goes on from here.", file=sys.stderr)
    if unread is not None:
        raise unread
    return Outcome(folder, result, summary, facts, len(journal.skipped()))


def _lost(lease: Lease | None, *, look: bool = False) -> bool:
    """Has another run taken the address over? Then the records there are its own. `look`: ask the store now."""
    return lease is not None and (lease.confirm() if look else lease.lost) is not None


def _rebase(pace: Pace, journal: Journal) -> None:
    counts = journal.counts()
    pace.rebase(done=counts["done"], failed=counts["failed"] + counts["filtered"])


def _request(
    request: RenderRequest, facts: Facts, folder: RunFolder, journal: Journal, place: Workplace, worker: WorkerProcess | None,
    trial: Sequence[Job], store: Store | None,
) -> RunRequest:
    run = request.run
    devices = tuple(part.torch_name for part in facts.devices) if facts.platform == "cuda" and facts.plan.replicas > 1 else ()
    workers_here = worker_count(request, facts) if run.engine == "local" else 1  # on a cluster each machine shares out its own
    groups = place.groups(facts) if place.groups is not None else facts.plan.groups if facts.plan.fsdp else ()
    return RunRequest(
        folder=folder, journal=journal, plan=facts.plan,
        setup=engine_settings(request, facts, folder, trial, store.location if store is not None else None),
        workers=worker_count(request, facts), devices=devices, groups=groups,
        stop_at=next_time(run.stop_at.strftime("%H:%M")) if run.stop_at is not None else None, max_hours=run.max_hours,
        retry_failed=run.retry_failed, verify=run.verify,
        delivery=Delivery(store, folder.outputs, overwrite=run.overwrite) if store is not None else None,
        prewarmed=(worker,) if worker is not None else (), launcher=place.launcher(request, facts),
        max_worker_bytes=None if run.host_memory_bytes is None else run.host_memory_bytes // workers_here,
        hang_seconds=HANG_SECONDS if run.job_timeout is None else run.job_timeout,
    )


@contextmanager
def _events_file(path: str) -> Iterator[TextIO]:
    try:
        file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}", option="--events") from None
    with file:
        yield file


def _listener(summary: Summary, display: Display, events: TextIO | None, started: float) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        summary.listen(event)
        display.listen(event)
        if events is not None:
            with disk_errors(Path(events.name)):
                events.write(event_line(event, time.monotonic() - started) + "\n")

    return listen
