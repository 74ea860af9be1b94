"""One row's cells to typed fields, with every fault the row has. Knows nothing of other rows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.errors import Fault
from batchgen.inventory.prompt_limits import SEVERAL_IMAGES
from batchgen.jobs import ShapeKey
from batchgen.manifest import values
from batchgen.manifest.columns import COLUMNS, Layout, match_header
from batchgen.manifest.objects import as_json
from batchgen.manifest.options import INPUTS, ManifestOptions
from batchgen.manifest.pictures import picture_paths, picture_problem
from batchgen.manifest.rows import Cells
from batchgen.manifest.sizes import Misfit, misfits, option_refusal
from batchgen.units import counted

SETTINGS = ("negative_prompt", "width", "height", "steps", "guidance", "true_cfg_scale", "num_frames", "fps", "strength", "lora")
SHAPE_SETTINGS = ("width", "height", "num_frames", "fps", "steps", "guidance", "true_cfg_scale", "strength", "lora")
_PATHS = ("image", "last_image", "mask")
NO_LORA = "none"  # a row's word for going without, where the run has a LoRA for all
_LORA = re.compile(r"(.+?)(?::([+-]?[0-9]*\.?[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Row:
    """A row without faults."""

    line: int
    said: Mapping[str, object]  # known fields the row itself says, typed
    settings: Mapping[str, object]  # SETTINGS and num_images with the run's defaults in
    snapped: tuple[tuple[str, int], ...]  # what the row or the run asked for where --snap took another value
    extra: tuple[tuple[str, str], ...]


def shape_of(row: Row) -> ShapeKey:
    """The shape of the row's jobs."""
    inputs = tuple(name for name in ("image", "last_image", "mask") if name in row.said)
    sizes: Any = {name: row.settings[name] for name in SHAPE_SETTINGS}
    return ShapeKey(**sizes, inputs=inputs)


def pictures_of(row: Row) -> int:
    pictures = row.settings["num_images"]
    assert isinstance(pictures, int)
    return pictures


class RowReader:
    """Reads rows under the options of one run."""

    def __init__(self, options: ManifestOptions, *, name: str, folder: str, decimal_comma: Callable[[], bool] = lambda: False) -> None:
        self.options = options
        self.name = name
        self.defaults, self.snapped_defaults = _defaults(options)
        self._folder = folder
        self._comma = decimal_comma
        self._read = self._readers()
        self._layouts: dict[tuple[str, ...], tuple[Layout, tuple[Fault, ...]]] = {}

    def layout(self, header: tuple[str, ...], line: int | None) -> tuple[Layout, tuple[Fault, ...]]:
        """The layout of a header, and everything wrong with it."""
        if header not in self._layouts:
            layout, faults = match_header(
                header, file=self.name, line=line, prompt_column=self.options.prompt_column, carry=self.options.carry,
            )
            self._layouts[header] = layout, tuple(faults)
        return self._layouts[header]

    def read(self, layout: Layout, line: int, cells: Cells) -> tuple[Row | None, list[Fault]]:
        """The row, or None and why not."""
        if len(cells) > len(layout.header):
            return None, [self._too_long(layout, line, cells)]
        faults: list[Fault] = []
        said: dict[str, object] = {}

        def fault(field: str, value: object, message: str, fix: str, kind: str) -> None:
            faults.append(Fault(self.name, line, layout.heading(field), values.shown(value), message, fix, kind))

        for field, place in layout.fields:
            cell = cells[place] if place < len(cells) else None
            try:
                value = self._read[field](cell)
            except values.Problem as problem:
                fault(field, cell, problem.message, problem.fix, problem.kind)
                said[field] = None  # said, though wrongly: nothing else may complain that it is missing
                continue
            if value is None:
                continue
            if field == "size":
                said["width"], said["height"] = value
            else:
                said[field] = value
        if "prompt" not in said:
            if self.options.allow_empty_prompt:
                said["prompt"] = ""
            else:
                fault("prompt", None, "the prompt is empty", "write one, or allow it with --allow-empty-prompt", "empty-prompt")
        for field in INPUTS:
            if said.get(field) is not None:
                self._check_input(field, said, fault)
        extra = self._extra(layout, cells, fault)
        said = {field: value for field, value in said.items() if value is not None}
        settings = {**self.defaults, **{field: value for field, value in said.items() if field in self.defaults}}
        snapped = [(field, asked) for field, asked in self.snapped_defaults if field not in said]
        for misfit in misfits(said, self.options.rules):
            if self.options.snap:
                snapped.append((misfit.field, misfit.value))
                settings[misfit.field] = misfit.nearest[0]
            else:
                fault(misfit.field if misfit.field in dict(layout.fields) else "size", misfit.value, *describe(misfit), "size")
        if faults:
            return None, faults
        if self.options.rules is not None and not self.options.rules.is_video:
            settings["num_frames"] = settings["fps"] = None
        return Row(line, said, settings, tuple(snapped), extra), []

    def _number(self, cell: object) -> float | None:
        return values.number(cell, decimal_comma=self._comma())

    def _unit(self, cell: object) -> float | None:
        return values.number(cell, high=1.0, decimal_comma=self._comma())

    def _rate(self, cell: object) -> float | None:
        return values.rate(cell, decimal_comma=self._comma())

    def _readers(self) -> dict[str, Callable[[object], Any]]:
        """How the cells of each known column are read."""
        kinds: dict[str, Callable[[object], Any]] = {
            "prompt": values.text, "text": values.text, "path": values.path, "id": values.identifier, "seed": values.seed,
            "integer": values.integer, "size": values.size, "number": self._number, "unit": self._unit,
            "rate": self._rate,
        }
        return {column.name: kinds[column.kind] for column in COLUMNS}

    def _check_input(self, field: str, said: dict[str, object], fault: Callable[[str, object, str, str, str], None]) -> None:
        value = said[field]
        if field in _PATHS:
            assert isinstance(value, str)
            several = field == "image" and SEVERAL_IMAGES in self.options.inputs_supported
            for part in picture_paths(value, self.absolute, several=several):
                path = self.absolute(part).encode("utf-8", "surrogateescape")
                if not os.path.isfile(path):
                    fault(field, part, "there is no such file", "paths are relative to the manifest's folder", "no-file")
                elif field in self.options.inputs_supported and (problem := picture_problem(path)) is not None:
                    fault(field, part, problem.message, problem.fix, problem.kind)
        elif field == "lora" and field in self.options.inputs_supported:
            match = _LORA.fullmatch(str(value).strip())
            name = match.group(1) if match else str(value)
            names = [lora.name for lora in self.options.loras]
            if name not in (*names, NO_LORA):
                known = ", ".join(names) or "none"
                fault(field, value, f"no LoRA of that name was given to the run (given: {known})", f"add --lora {name}=PATH", "no-lora")
        if field not in self.options.inputs_supported:
            whom = "" if field == "lora" else " with this model"
            fault(field, value, f"{field} is not supported{whom} yet", "leave the column blank, or out", "not-yet")

    def absolute(self, path: str) -> str:
        """A path of the manifest, from its folder on."""
        return os.path.normpath(os.path.join(self._folder, path))

    def _too_long(self, layout: Layout, line: int, cells: Cells) -> Fault:
        surplus = ", ".join(str(cell) for cell in cells[len(layout.header) :])
        message = f"{counted(len(cells), 'field')} under {counted(len(layout.header), 'column')}; too many"
        fix = "put text that holds the delimiter in quotes, or use a .txt file for bare prompts"
        return Fault(self.name, line, None, values.shown(surplus), message, fix, "too-many-fields")

    @staticmethod
    def _extra(layout: Layout, cells: Cells, fault: Callable[[str, object, str, str, str], None]) -> tuple[tuple[str, str], ...]:
        found = []
        for heading, place in layout.extra:
            cell = cells[place] if place < len(cells) else None
            text = cell if isinstance(cell, str) else as_json(cell)
            try:
                values.check_text(text)
            except values.Problem as problem:
                fault(heading, None, problem.message, problem.fix, problem.kind)
            found.append((heading, text))
        return tuple(found)


def describe(misfit: Misfit) -> tuple[str, str]:
    """(what is wrong, what to do) of a size the model cannot make."""
    return f"{misfit.field} {misfit.rule}", f"take {' or '.join(map(str, misfit.nearest))}, or let --snap take {misfit.nearest[0]}"


def _defaults(options: ManifestOptions) -> tuple[dict[str, object], tuple[tuple[str, int], ...]]:
    """The run's defaults, legal under the model's rules, and what was asked for where --snap changed one."""
    settings: dict[str, object] = {name: getattr(options.defaults, name, None) for name in (*SETTINGS, "num_images")}
    snapped = []
    found = misfits(settings, options.rules)
    if found and not options.snap:
        raise option_refusal(found, (settings["width"], settings["height"]) if options.one_size else None)
    for misfit in found:
        settings[misfit.field] = misfit.nearest[0]
        snapped.append((misfit.field, misfit.value))
    return settings, tuple(snapped)
