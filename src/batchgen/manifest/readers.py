"""From a manifest's name to its rows: which kind it is, and the reader for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from batchgen.errors import Fault, UsageError
from batchgen.manifest.blocks import blocks
from batchgen.manifest.delimited import DelimitedReader
from batchgen.manifest.lists import read_folder, read_lines
from batchgen.manifest.notices import NoticeLog
from batchgen.manifest.objects import read_json_array, read_json_lines
from batchgen.manifest.options import KINDS, ManifestOptions
from batchgen.manifest.parquet import read_parquet
from batchgen.manifest.rows import Chunk, FileFaultError

_BY_SUFFIX = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "txt",
              ".parquet": "parquet", ".pq": "parquet"}
_FORMATS = {"ndjson": "jsonl"}


def find_kind(path: str, options: ManifestOptions) -> str:
    """One of KINDS. Raises UsageError where neither `--format` nor the file's name says it, or nothing is there."""
    shown = options.shown_as or path
    if not os.path.exists(path):
        raise UsageError(f"there is no manifest {shown!r}", option="MANIFEST")
    if not os.path.isfile(path) and not os.path.isdir(path):
        hint = "Hand it over on standard input: batchgen ... - --format KIND < it"
        raise UsageError(f"{shown!r} is a pipe or a device, and a manifest is read twice", option="MANIFEST", hint=hint)
    kinds = ", ".join(KINDS)
    if options.format is not None:
        kind = _FORMATS.get(options.format.casefold(), options.format.casefold())
        if kind not in KINDS:
            raise UsageError(f"--format: {options.format!r} is none of {kinds}", option="--format")
        if os.path.isdir(path) != (kind == "folder"):
            what = "is a folder" if os.path.isdir(path) else "is no folder"
            raise UsageError(f"{shown!r} {what}, which --format {kind} does not fit", option="--format")
        return kind
    if os.path.isdir(path):
        return "folder"
    suffix = os.path.splitext(path)[1].casefold()
    if suffix not in _BY_SUFFIX:
        message = f"the name {shown!r} does not say what kind of manifest it is; name it with --format ({kinds})"
        raise UsageError(message, option="--format")
    return _BY_SUFFIX[suffix]


class Reader:
    """A manifest's chunks, read once from its beginning. `delimiter` and `header` say afterwards what was found."""

    def __init__(self, path: str, options: ManifestOptions, notices: NoticeLog) -> None:
        self.kind = find_kind(path, options)
        self.name = options.shown_as or path
        self._path, self._options, self._notices = path, options, notices
        self._delimited: DelimitedReader | None = None
        delimiter = options.delimiter
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise UsageError(f"--delimiter: {delimiter!r} is not one character that can stand between columns", option="--delimiter")

    @property
    def delimiter(self) -> str | None:
        return self._delimited.delimiter if self._delimited else None

    @property
    def header(self) -> tuple[tuple[str, ...], int] | None:
        """(header, its line) of a file that has one."""
        return (self._delimited.header, self._delimited.header_line) if self._delimited else None

    def __iter__(self) -> Iterator[Chunk]:
        if self.kind == "folder":
            yield from read_folder(self._path, name=self.name, encoding=self._options.encoding, limit=self._options.limit)
        elif self.kind == "parquet":
            yield from read_parquet(self._path, name=self.name)
        else:
            try:
                with open(self._path, "rb") as file:
                    source = blocks(file, name=self.name, encoding=self._options.encoding, lf_only=self.kind == "jsonl")
                    if self.kind == "jsonl":
                        yield from read_json_lines(source, name=self.name)
                    elif self.kind == "json":
                        yield from read_json_array(source, name=self.name)
                    elif self.kind == "txt":
                        yield from read_lines(source, name=self.name, notices=self._notices)
                    else:
                        self._delimited = DelimitedReader(
                            source, name=self.name, tsv=self.kind == "tsv", delimiter=self._options.delimiter,
                            prompt_column=self._options.prompt_column, notices=self._notices,
                        )
                        yield from self._delimited
            except OSError as error:
                what = f"cannot be read: {error.strerror or error}"
                raise FileFaultError(Fault(self.name, None, None, None, what, "check its permissions and its disk", "unreadable")) from None
