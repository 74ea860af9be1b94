"""The second pass: rows to jobs, streamed. Runs after `check` under the same options."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from batchgen.errors import ManifestError
from batchgen.inventory.prompt_limits import SEVERAL_IMAGES
from batchgen.jobs import SEED_LIMIT, Job, SeedSource, job_key, picture_seed, seed_from_row
from batchgen.manifest.columns import COLUMNS
from batchgen.manifest.notices import NoticeLog
from batchgen.manifest.options import ManifestOptions
from batchgen.manifest.pictures import BETWEEN, picture_paths
from batchgen.manifest.rows import FileFaultError
from batchgen.manifest.schema import SETTINGS, Row, pictures_of
from batchgen.manifest.stream import RowStream, identity
from batchgen.outputs.names import Names, Template, field_name, parse_template, plan_name


def jobs(path: str, options: ManifestOptions) -> Iterator[Job]:
    """The manifest's jobs in file order. Rows with faults are left out under --skip-invalid, and raise ManifestError otherwise."""
    stream = RowStream(path, options, NoticeLog())
    maker = _Maker(options, stream)
    try:
        for layout, chunk, faults in stream.chunks():
            if stream.has_header and faults:
                raise ManifestError(faults)
            for entry in stream.entries(layout, chunk, faults):
                if entry.row is not None:
                    yield from maker.jobs_of(entry.index, entry.row)
                elif entry.faults and not options.skip_invalid:
                    raise ManifestError(entry.faults)
    except FileFaultError as error:
        raise ManifestError(error.faults) from None


class _Maker:
    def __init__(self, options: ManifestOptions, stream: RowStream) -> None:
        self.options = options
        self._absolute = stream.rows.absolute
        self._template: Template = parse_template(options.name_template, extension=options.extension)
        known = {column.name for column in COLUMNS}
        wanted = self._template.fields - {"index", "id", "model", "prompt", "slug", "seed", "k"}
        self._columns, self._extra = wanted & known, wanted - known
        self._names = None if self._template.counts_rows else Names()
        self._seen: dict[bytes, int] = {}
        self._pixels = dict(options.pixel_settings)

    def jobs_of(self, index: int, row: Row) -> Iterator[Job]:
        """One job a picture of the row."""
        said, settings, options = row.said, row.settings, self.options
        digest = identity(said)
        occurrence = self._occurrence(digest)
        name = said.get("id") or (f"{digest[:12]}-{occurrence}" if occurrence else digest[:12])
        seed, source = self._seed(row, digest, occurrence)
        pixels = {**self._pixels, **{field: settings[field] for field in SETTINGS}}
        if source == "option":
            pixels["seed"] = str(seed)
        pictures = pictures_of(row)
        fields = self._name_fields(index, row, str(name))
        typed: Any = {field: settings[field] for field in SETTINGS}
        inputs: Any = {field: self._placed(field, str(said[field])) for field in ("image", "last_image", "mask") if field in said}
        for k in range(pictures):
            own_seed = picture_seed(seed, k)
            fields["k"], fields["seed"] = k, own_seed
            output = plan_name(self._template, fields, pictures=pictures, extension=options.extension)
            yield Job(
                key=job_key(digest, occurrence, k, options.model_revision, pixels), index=index, row=row.line, k=k, id=str(name),
                prompt=str(said["prompt"]), seed=own_seed, seed_source=source,
                output=output if self._names is None else self._names.claim(output), extra=row.extra, snapped=row.snapped,
                **typed, **inputs,
            )

    def _placed(self, field: str, cell: str) -> str:
        """A cell's paths, each from the manifest's folder on."""
        several = field == "image" and SEVERAL_IMAGES in self.options.inputs_supported
        return f" {BETWEEN} ".join(self._absolute(path) for path in picture_paths(cell, self._absolute, several=several))

    def _occurrence(self, digest: str) -> int:
        """How many equal rows came before."""
        key = bytes.fromhex(digest[:32])
        count = self._seen.get(key, 0)
        self._seen[key] = count + 1
        return count

    def _seed(self, row: Row, digest: str, occurrence: int) -> tuple[int, SeedSource]:
        own, default = row.said.get("seed"), self.options.defaults.seed
        if isinstance(own, int):
            return own, "row"
        if own is None and isinstance(default, int):
            return default, "option"
        if own == "random" or default == "random":
            return secrets.randbelow(SEED_LIMIT), "drawn"
        return seed_from_row(digest, occurrence), "identity"

    def _name_fields(self, index: int, row: Row, name: str) -> dict[str, object]:
        fields: dict[str, object] = {"index": index, "id": name, "model": self.options.model_name, "prompt": row.said["prompt"]}
        for field in self._columns:
            fields[field] = row.settings.get(field, row.said.get(field))
        if self._extra:
            fields.update((field, value) for heading, value in row.extra if (field := field_name(heading)) in self._extra)
        return fields
