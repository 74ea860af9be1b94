"""No file brings the reader down: whatever its bytes, it has jobs or faults, and jobs come out as the check counted them."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from manifestkit import options, write

from batchgen.manifest import jobs, survey

KINDS = ["csv", "tsv", "jsonl", "json", "txt", *(["parquet"] if importlib.util.find_spec("pyarrow") else [])]
PIECES = st.sampled_from([
    b"prompt", b"seed", b"id", b"width", b",", b";", b"\t", b"|", b"\n", b"\r\n", b"\r", b'"', b'""', b"\0", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xff\xfe", b"sep=;",
    b"a cat", b"7", b"-1", b" ", b"{", b"}", b"[", b"]", b":", b'"prompt":', b'"a"', b'{"prompt": "a"}', b"null", b"NaN", b"1e999", b"#", b"\\u0000", b"\\ud800",
    b"prompt,seed\na cat,7\n", b'"a\nb",1\n', "é猫🐈".encode(), b"\xe2\x80\xa8", b"PAR1",
])
FILES = st.lists(PIECES, max_size=25).map(b"".join) | st.binary(max_size=60)


@settings(max_examples=150, deadline=None)
@given(FILES, st.sampled_from(KINDS), st.booleans(), st.booleans(), st.sampled_from([None, "cp1252", "utf-16"]))
def test_of_any_bytes(data: bytes, kind: str, skip_invalid: bool, lenient: bool, encoding: str | None) -> None:
    chosen = options(format=kind, skip_invalid=skip_invalid, allow_empty_prompt=lenient, dedupe=lenient, encoding=encoding, name_template="{id}")
    with tempfile.TemporaryDirectory() as folder:
        path = str(write(Path(folder) / "any", data))
        summary = survey(path, chosen)
        assert summary.jobs or summary.fault_total
        assert all(fault.message and fault.fix and "\n" not in fault.message for fault in summary.faults)
        if not summary.fault_total or (skip_invalid and not summary.fatal and summary.jobs):
            made = list(jobs(path, chosen))
            assert len(made) == summary.jobs
            assert len({job.output.casefold() for job in made}) == len({job.key for job in made}) == len(made)
