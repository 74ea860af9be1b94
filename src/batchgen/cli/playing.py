"""A rehearsal's own process as the command line sees it: what it plays is told every few seconds, its last line is the answer."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from batchgen.units import duration_text

TELL_SECONDS = 5.0  # a rehearsal that is done sooner says nothing of its stages


def played_apart(
    command: Sequence[str], request: Mapping[str, Any], environment: Mapping[str, str], *, note: Callable[[str], None], seconds: float,
    tell_seconds: float = TELL_SECONDS,
) -> dict[str, Any]:
    """The answer of the process to the request. Raises OSError, ValueError (no answer), subprocess.TimeoutExpired."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True, encoding="utf-8")
    assert process.stdin is not None
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    began = time.monotonic()
    try:
        with process.stdin as asked:
            json.dump(request, asked)
        return _followed(lines, note, began, tell_seconds, began + seconds)
    except TimeoutError:
        raise subprocess.TimeoutExpired(command, seconds) from None
    finally:
        process.kill()  # nothing is left to do once it has answered
        process.wait()
        reader.join()
        process.stdout.close()


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _followed(lines: queue.Queue[str | None], note: Callable[[str], None], began: float, every: float, until: float) -> dict[str, Any]:
    playing, told = "", began
    while True:
        try:
            line = lines.get(timeout=max(0.0, min(told + every, until) - time.monotonic()))
        except queue.Empty:
            told = time.monotonic()
            if told >= until:
                raise TimeoutError from None
            note(f"  {playing or 'building the components'} ({duration_text(told - began)})")
            continue
        if line is None:
            raise ValueError("the process ended without an answer")
        found: dict[str, Any] = json.loads(line)
        if "playing" not in found:
            return found
        playing = f"playing {found['playing']}"
