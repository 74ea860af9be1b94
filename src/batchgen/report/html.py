"""report.html: one file that opens from disk, asks nothing of the network, and shows what the night made.

Prompts, names and reasons are data: jinja2 escapes them, and the gallery's script only ever sets text.
"""

from __future__ import annotations

import base64
import json
import secrets
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from batchgen import __version__
from batchgen.journal import Journal
from batchgen.outputs.files import atomic_write
from batchgen.outputs.thumbnails import MOST, PICTURES, Thumbnails, thumbnail
from batchgen.report.contact import LIMIT, Tile, contact_sheet
from batchgen.report.data import ReportData, collect, jobs
from batchgen.report.safe import printable
from batchgen.runfolder import RunFolder
from batchgen.units import duration_text, size_text

# Thumbnails beyond this are the files themselves, loaded as they are looked at: a page of 100,000 must still open.
EMBEDDED = MOST
REASONS_SHOWN = 200
# Lines over less than this say nothing that the tables do not.
_CHARTED_SECONDS = 120.0


def write_report(folder: RunFolder, *, charts: bool | None = None) -> Path:
    """Writes RUN/report.html, streamed: memory does not grow with the number of jobs. Raises RefusedError without a journal, DiskError.

    `charts`: None draws them where the run was long enough to be worth loading the library that draws.
    """
    with Journal.read(folder.journal) as journal:
        data = collect(folder, journal)
        template = _environment().get_template("report.html.j2")
        drawn = data.axis.seconds >= _CHARTED_SECONDS if charts is None else charts
        pieces = template.generate(**_values(data, charts=drawn), rows=_rows(folder, journal))

        def save(handle: Any) -> None:
            for piece in pieces:
                handle.write(piece.encode("utf-8", "replace"))

        atomic_write(folder.report, save, overwrite=True)
    return folder.report


def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("batchgen.report", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown,
    )
    environment.filters["size"] = lambda value: "–" if not value else size_text(int(value))
    environment.filters["seconds"] = lambda value: "–" if not value else duration_text(float(value))
    environment.filters["brief"] = _brief
    return environment


def _brief(seconds: float) -> str:
    """Of a job's time in a stage, hundredths matter."""
    return "–" if not seconds else f"{seconds:.2f} s" if seconds < 10 else duration_text(seconds)


def _shown(value: Any) -> Any:
    """Control characters of names and reasons as escapes: a page is read in terminals too. Our own markup passes."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _values(data: ReportData, *, charts: bool) -> dict[str, Any]:
    stages = data.measured.get("stages", {})
    return {
        "title": data.folder.path.name, "version": __version__, "data": data, "counts": data.counts, "total": data.total,
        "model": data.model, "revision": _revision(data.run), "elapsed": _elapsed(data), "nonce": secrets.token_urlsafe(12),
        "components": _components(data), "stages": stages, "predicted": data.plan.get("predicted", {}),
        "charts": _charts(data, stages) if charts else [],
        "advice": data.measured.get("advice", []), "reasons": REASONS_SHOWN,
    }


def _charts(data: ReportData, stages: Mapping[str, Any]) -> list[str]:
    # The drawing library costs a second to load, which a short run's end should not.
    from batchgen.report.charts import night_chart, share_chart

    drawn = (
        night_chart(data.lanes, data.memory, data.rate, hours=data.axis.seconds / 3600, joints=data.axis.joints),
        share_chart("Time in the stages", {name: stage.get("seconds", 0.0) for name, stage in stages.items()}, "seconds"),
    )
    return [chart for chart in drawn if chart]


def _revision(run: Mapping[str, Any]) -> str:
    model = run.get("model")
    return str(model.get("revision", "")) if isinstance(model, Mapping) else ""


def _elapsed(data: ReportData) -> float:
    """Seconds that the runs of this folder took."""
    return data.axis.seconds


def _components(data: ReportData) -> list[dict[str, Any]]:
    """Placement from the plan beside what was measured; components that only one of them knows come too."""
    placements = data.plan.get("placements", {})
    measured = data.measured.get("components", {})
    names = [*placements, *(name for name in measured if name not in placements)]
    return [{"name": name, **placements.get(name, {}), "use": measured.get(name, {})} for name in names]


def _rows(folder: RunFolder, journal: Journal) -> Iterator[str]:
    """Every job as JSON that is safe inside a script element."""
    left, outputs = EMBEDDED, _outputs(folder)
    for row in jobs(journal):
        if row.get("state") == "done" and "output" in row:
            row["href"] = outputs + quote(row["output"])
            row["again"] = "batchgen rerender " + shlex.quote(str(folder.outputs / row["output"]))
            small = _thumbnail(folder, row) if left > 0 else None
            if small is not None:
                row["thumb"] = small
                left -= 1
        row["seed"] = str(row.get("seed", ""))  # beyond 2^53 a number would lose its last digits in the browser
        text = json.dumps(row, ensure_ascii=True, separators=(",", ":"))
        yield text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _outputs(folder: RunFolder) -> str:
    """Where the outputs lie, seen from the page: beside it, but for a shard whose page lies among its records in a store."""
    run = folder.read_run() or {}
    return "../../outputs/" if run.get("remote") and run.get("shard") else "outputs/"


def _thumbnail(folder: RunFolder, row: Mapping[str, Any]) -> str | None:
    """As a data URI, of the file or, where that went to a store, as kept; None for what is no picture or cannot be opened."""
    path = folder.outputs / row["output"]
    data = thumbnail(path) if path.exists() else Thumbnails(folder.thumbs).read(row["key"])
    return None if data is None else "data:image/webp;base64," + base64.b64encode(data).decode("ascii")


def write_contact_sheet(folder: RunFolder) -> Path | None:
    """Writes RUN/contact.png from the first pictures of the list; None where there is no picture. Raises DiskError."""
    tiles = []
    with Journal.read(folder.journal) as journal:
        for row in jobs(journal):
            path = folder.outputs / row.get("output", "")
            if row.get("state") == "done" and path.suffix.lower() in PICTURES:
                kept = path if path.exists() else Thumbnails(folder.thumbs).path(row["key"])
                tiles.append(Tile(kept, row.get("prompt", "")))
            if len(tiles) == LIMIT:
                break
    if not tiles:
        return None
    many = len(tiles) > 24
    sheet = contact_sheet(tiles, title=f"batchgen: {folder.path.name}", columns=6 if many else 4, side=192 if many else 256)
    place = folder.path / "contact.png"
    atomic_write(place, lambda handle: sheet.save(handle, "PNG"), overwrite=True)
    return place
