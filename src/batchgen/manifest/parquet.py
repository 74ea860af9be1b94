"""Parquet files, through pyarrow, which is an extra: `pip install "batchgen[parquet]"`."""

from __future__ import annotations

from collections.abc import Iterator

from batchgen.errors import Fault, UsageError
from batchgen.manifest.rows import Cells, Chunk, FileFaultError

ROWS_A_CHUNK = 8192


def read_parquet(path: str, *, name: str) -> Iterator[Chunk]:
    """The file's columns as given. A row's number counts from 1. Raises UsageError without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        hint = 'python -m pip install "batchgen[parquet]"'
        raise UsageError("reading Parquet needs pyarrow, which is not installed", option="--format", hint=hint) from None
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise FileFaultError(_broken(name, error)) from None
    with file:
        header = tuple(file.schema_arrow.names)
        line = 1
        try:
            for batch in file.iter_batches(batch_size=ROWS_A_CHUNK):
                columns = [column.to_pylist() for column in batch.columns]
                rows: list[Cells | Fault] = list(zip(*columns, strict=True))
                yield Chunk(header, 0, range(line, line + len(rows)), rows, escapes=True)
                line += len(rows)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise FileFaultError(_broken(name, error)) from None


def _broken(name: str, error: Exception) -> Fault:
    return Fault(name, None, None, None, f"not a readable Parquet file: {str(error)[:200].rstrip('.')}", "write it again", "parquet")

