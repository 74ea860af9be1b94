"""The first pass: the whole manifest checked in bounded memory, before a model is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.errors import Fault, ManifestError
from batchgen.jobs import ShapeKey
from batchgen.manifest import prompts
from batchgen.manifest.bulk import Bulk
from batchgen.manifest.columns import COLUMNS, Layout
from batchgen.manifest.faultfile import fault_file
from batchgen.manifest.first_rows import with_first_rows
from batchgen.manifest.notices import Notice, NoticeLog
from batchgen.manifest.options import ManifestOptions
from batchgen.manifest.rows import Chunk, FaultLog, FileFaultError
from batchgen.manifest.schema import Row, pictures_of, shape_of
from batchgen.manifest.stream import RowStream
from batchgen.outputs.names import parse_template


@dataclass(frozen=True, slots=True)
class ShapeCount:
    shape: ShapeKey
    jobs: int


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that --skip-invalid left out. `index` is its place among the rows, from 0; `reason` is all that is wrong with it."""

    index: int
    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """What a manifest holds. `rows` are those that are not blank; `faults` the first ones of `fault_total`."""

    path: str
    kind: str
    rows: int
    jobs: int
    shapes: tuple[ShapeCount, ...]  # most jobs first
    warnings: tuple[Notice, ...]
    skipped: tuple[SkippedRow, ...]
    faults: tuple[Fault, ...]
    fault_total: int
    fault_counts: tuple[tuple[str, int], ...]
    fatal: bool  # a fault that --skip-invalid cannot skip
    extra_columns: tuple[str, ...]
    delimiter: str | None
    longest_prompt: str = ""  # in bytes


def check(path: str, options: ManifestOptions) -> ManifestSummary:
    """Reads the whole manifest. Raises ManifestError with all its faults (with --skip-invalid: only for a file without one good row),
    UsageError for options that do not fit it."""
    summary = survey(path, options)
    if summary.fault_total and (summary.fatal or not options.skip_invalid or summary.jobs == 0):
        raise ManifestError(summary.faults, total=summary.fault_total, counts=dict(summary.fault_counts))
    return summary


def survey(path: str, options: ManifestOptions) -> ManifestSummary:
    """Like `check`, but faults are told in the summary. No job at all is a fault."""
    with fault_file(options.faults_file) as sink:
        return _Survey(path, options, FaultLog(sink)).run()


class _Survey:
    def __init__(self, path: str, options: ManifestOptions, log: FaultLog) -> None:
        parse_template(options.name_template, extension=options.extension)  # wrong syntax is told before a long file is read
        self.path, self.options, self.log = path, options, log
        self.notices = NoticeLog()
        self.stream = RowStream(path, options, self.notices)
        self.bulk = Bulk(self.stream)
        self.shapes: Counter[ShapeKey] = Counter()
        self.skipped: list[SkippedRow] = []
        self.fatal = False
        self.longest = ""

    def run(self) -> ManifestSummary:
        told = False
        try:
            for layout, chunk, faults in self.stream.chunks():
                if self.stream.has_header and faults and not told:
                    told = self.fatal = True
                    self.log.add(faults)
                self._chunk(layout, chunk, faults)
        except FileFaultError as error:
            self.fatal = True
            self.log.add(error.faults)
        self._finish()
        return ManifestSummary(
            path=self.stream.reader.name, kind=self.stream.kind, rows=self.stream.index, jobs=sum(self.shapes.values()),
            shapes=tuple(ShapeCount(shape, count) for shape, count in self.shapes.most_common()), warnings=self.notices.notices,
            skipped=tuple(self.skipped), faults=with_first_rows(self.log.faults, self.path, self.options), fault_total=self.log.total,
            fault_counts=tuple(self.log.counts.items()),
            fatal=self.fatal, extra_columns=tuple(self.stream.extra), delimiter=self.stream.reader.delimiter,
            longest_prompt=self.longest,
        )

    def _chunk(self, layout: Layout, chunk: Chunk, faults: Sequence[Fault]) -> None:
        taken = self.bulk.take(layout, chunk, faults)
        if taken is not None:
            for sample in taken.samples:
                self._count(sample.row, sample.shape, sample.count, sample.lines)
            self._tell(taken.drawn, taken.negatives)
            self._prompts(chunk.lines, taken.prompts)
            return
        good: list[Row] = []
        for entry in self.stream.entries(layout, chunk, faults):
            if entry.faults:
                self.log.add(entry.faults)
                if self.options.skip_invalid:
                    self.skipped.append(SkippedRow(entry.index, entry.line, "; ".join(map(str, entry.faults))[:500]))
            elif entry.row is not None:
                good.append(entry.row)
                said = entry.row.said
                self._count(entry.row, shape_of(entry.row), 1, (entry.line,))
                self._tell((entry.line,) if said.get("seed") == "random" else (), (entry.line,) if "negative_prompt" in said else ())
        self._prompts([row.line for row in good], [str(row.said["prompt"]) for row in good])

    def _count(self, row: Row, shape: ShapeKey, count: int, lines: Sequence[int]) -> None:
        """Counts so many rows with the settings of `row`. `lines` are theirs where there is something to say of them."""
        self.shapes[shape] += pictures_of(row) * count
        if row.snapped:
            asked = ", ".join(f"{field} {value} became {row.settings[field]}" for field, value in row.snapped)
            self._note("snapped", lines, asked)
        rules = self.options.rules
        if rules is not None and not rules.is_video and ("num_frames" in row.said or "fps" in row.said):
            self._note("frames-ignored", lines)

    def _tell(self, drawn: Sequence[int], negatives: Sequence[int]) -> None:
        self._note("drawn", drawn)
        if self.options.takes_negative_prompt is False:
            self._note("negative-ignored", negatives)

    def _note(self, kind: str, lines: Sequence[int], example: str | None = None) -> None:
        for line in lines:
            self.notices.add(kind, line, example)

    def _prompts(self, lines: Sequence[int], texts: Sequence[str]) -> None:
        prompts.scan(lines, texts, self.notices)
        self.longest = max(self.longest, *texts, key=_size) if texts else self.longest
        if self.stream.lengths is None:
            return
        for line, text in zip(lines, texts, strict=True):
            lost = self.stream.lengths.lost(text)
            if lost is None:
                continue
            if lost.by_all:
                self.notices.add("truncated", line, f"{lost.text}; lost: {lost.tail[:120]!r}")
            else:
                self.notices.add("partly-read", line, lost.text)

    def _finish(self) -> None:
        if not self.log.total and self.stream.index == 0:
            fix = "add rows with a prompt"
            blank = self.notices.count("blank-rows")
            what = "no jobs: nothing but blank rows" if blank else "no jobs: the file has no rows"
            self.log.add([Fault(self.stream.reader.name, None, None, None, what, fix, "no-jobs")])
            self.fatal = True
        if not self.fatal:
            columns = [*self.stream.extra, *(column.name for column in COLUMNS)]
            parse_template(self.options.name_template, extension=self.options.extension, columns=columns)
        if self.options.takes_negative_prompt is False and self.options.defaults.negative_prompt is not None:
            self.notices.add("default-negative-ignored")
        if self.stream.lengths is not None and self.stream.lengths.unread:
            self.notices.add("not-counted", example=", ".join(self.stream.lengths.unread))
        if self.stream.extra:
            names = ", ".join(repr(name[:60]) for name in list(self.stream.extra)[:20])
            self.notices.add("extra-columns", example=names, count=len(self.stream.extra))


def _size(text: str) -> int:
    """Bytes: scripts of many characters a word have few bytes a character."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
