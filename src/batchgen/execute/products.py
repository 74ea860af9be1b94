"""From what a model decoded to files on disk: checks, rounding, writing, one event a job.

Writing runs on threads beside the device's work. A disk that gives out stops the run: the error waits in `error` and is raised at
the next check.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import RunStoppedError
from batchgen.events import Emit, JobFailed, OutputDone
from batchgen.execute.load import first_line
from batchgen.execute.settings import OutputSettings
from batchgen.execute.windows import Row
from batchgen.outputs.delivery import Delivery
from batchgen.outputs.files import make_folders
from batchgen.outputs.image import write_image
from batchgen.outputs.metadata import RECORD, settings_for
from batchgen.outputs.store import Store
from batchgen.outputs.whole import judge
from batchgen.reconcile import adoption
from batchgen.units import MIB

WRITERS = 2
WAITING_BYTES = 256 * MIB  # of products that may wait for a writer before the device has to; one may always

FLAG_SILENT = "no sound"  # the model made a sound track, and the format asked for holds none

FloatArray = npt.NDArray[np.float32]
Sound = tuple[FloatArray, int]  # samples [channels, samples] in -1..1, and their rate in Hz


def to_uint8(product: FloatArray) -> npt.NDArray[np.uint8]:
    """Floats in 0..1 as 0..255, rounded half to even, as the ordinary pipelines round."""
    return (product * 255).round().astype(np.uint8)


def difference(product: FloatArray, asked: Mapping[str, Any]) -> str | None:
    """How a product's size, length or channels differ from what was asked for; None where they do not.

    `product` [H, W, C] or [frames, H, W, C].
    """
    made = {"height": product.shape[-3], "width": product.shape[-2]}
    if product.ndim == 4:
        made["num_frames"] = product.shape[0]
    wrong = [f"{name} {asked[name]} was asked for, {size} came out" for name, size in made.items() if asked.get(name) not in (None, size)]
    if product.shape[-1] not in (3, 4):
        wrong.append(f"{product.shape[-1]} channels came out")
    return ", ".join(wrong) or None


class Products:
    """Takes decoded rows and ends each in exactly one OutputDone or JobFailed. Call `finish` at the end of a window."""

    def __init__(self, worker: int, outputs: OutputSettings, emit: Emit) -> None:
        self._worker = worker
        self._outputs = outputs
        self._emit = emit
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="write")
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._futures: list[Future[None]] = []
        self._error: BaseException | None = None
        store = Store(outputs.remote) if outputs.remote is not None else None
        # what only this process would see is the supervisor's to put
        self._delivery = Delivery(store, Path(outputs.folder), overwrite=outputs.overwrite) if store and not store.process_bound else None

    def take(
        self, row: Row, product: FloatArray, resolved: Mapping[str, Any], *, sound: Sound | None = None
    ) -> None:
        """Queues one row's product: a picture [H, W, C] or a clip [frames, H, W, C], floats in 0..1."""
        self.check()
        # frame by frame: the answers for a whole clip at once would take a quarter of its memory again
        if not all(np.isfinite(frame).all() for frame in (product if product.ndim == 4 else product[None])):
            reason = "the decoded picture holds values that are not numbers"
            self._emit(JobFailed(self._worker, row.job.key, "non-finite", "decode", reason))
            return
        with self._room:
            self._room.wait_for(lambda: not self._waiting_bytes or self._waiting_bytes + product.nbytes <= WAITING_BYTES)
            self._waiting_bytes += product.nbytes
        self._futures.append(self._pool.submit(self._write, row, product, dict(resolved), sound))

    def _write(self, row: Row, product: FloatArray, resolved: dict[str, Any], sound: Sound | None) -> None:
        try:
            self._emit(self._sent(self._made(row, product, resolved, sound)))
        except RunStoppedError as error:  # of the disk or of the store
            self._error = error
        except Exception as error:  # noqa: BLE001  one file that cannot be written fails its job, not the night
            self._emit(JobFailed(self._worker, row.job.key, "error", "write", first_line(error)))
        finally:
            with self._room:
                self._waiting_bytes -= product.nbytes
                self._room.notify_all()

    def _made(self, row: Row, product: FloatArray, resolved: dict[str, Any], sound: Sound | None) -> OutputDone | JobFailed:
        try:
            return self._written(row, product, resolved, sound)
        except FileExistsError:
            return self._already_there(row)

    def _sent(self, event: OutputDone | JobFailed) -> OutputDone | JobFailed:
        """After the store has answered, where files go to one."""
        return self._delivery.send(event) if self._delivery is not None and isinstance(event, OutputDone) else event

    def _already_there(self, row: Row) -> OutputDone | JobFailed:
        """The name is taken: by this very job's output, which is adopted, or by something else, which is left alone."""
        path = Path(self._outputs.folder) / row.job.output
        verdict, settings = judge(path, row.job.key)
        if verdict == "ours" and settings is not None:
            return adoption(path, row.job.key, row.job.output, settings, self._worker)
        return JobFailed(self._worker, row.job.key, "error", "write", f"{row.job.output} exists and is not this job's output")

    def _written(self, row: Row, product: FloatArray, resolved: dict[str, Any], sound: Sound | None) -> OutputDone:
        lowest, highest = to_uint8(np.array([product.min(), product.max()], dtype=np.float32))
        flags = (*row.flags, *(("flat",) if lowest == highest else ()))
        if sound is not None and self._outputs.video_format == "webp":
            sound, flags = None, (*flags, FLAG_SILENT)
        settings = settings_for(row.job, dict(self._outputs.metadata), row.batch, flags, resolved)
        path = Path(self._outputs.folder) / row.job.output
        make_folders(path.parent)
        if product.ndim == 3:
            kept, options = self._outputs.image_format, dict(self._outputs.image_options)
            size, digest = write_image(to_uint8(product), path, settings, kept, options, overwrite=self._outputs.overwrite)
        else:
            size, digest = self._write_clip(product, path, settings, float(resolved["fps"]), sound)
        return OutputDone(
            self._worker, row.job.key, row.job.output, size, digest, row.batch, row.seconds, settings[RECORD], flags
        )

    def _write_clip(
        self, clip: FloatArray, path: Path, settings: Mapping[str, str], fps: float, sound: Sound | None
    ) -> tuple[int, str]:
        from batchgen.outputs.video import write_video  # PyAV is only there for people who make clips

        kept, overwrite = self._outputs.video_format, self._outputs.overwrite
        frames = (to_uint8(frame) for frame in clip)  # rounded one by one: a clip is held once
        return write_video(frames, path, settings, fps=fps, video_format=kept, overwrite=overwrite, sound=sound)

    def check(self) -> None:
        """Raises the DiskError or StoreError that a writer met."""
        self._futures = [future for future in self._futures if not future.done()]
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Waits for all files; raises the DiskError or StoreError that a writer met."""
        for future in self._futures:
            future.result()
        self.check()

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class Unwritten:
    """In Products' place on the ranks of a group that write nothing: the first one does."""

    def take(self, row: Row, product: FloatArray, resolved: Mapping[str, Any], *, sound: Sound | None = None) -> None:
        """Drops the product."""

    def finish(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


def rows_of(outputs: Mapping[str, Any], rows: int) -> tuple[Sequence[FloatArray], Sequence[bool]]:
    """A decode's products, one array a row, and which of them a safety filter replaced."""
    products = outputs.get("images") if outputs.get("images") is not None else outputs.get("videos")
    if products is None or len(products) != rows:
        found = 0 if products is None else len(products)
        raise RunStoppedError(f"the model gave {found} products for {rows} rows")
    nsfw = outputs.get("nsfw")
    return [np.asarray(product) for product in products], [bool(flag) for flag in nsfw] if nsfw is not None else [False] * rows
