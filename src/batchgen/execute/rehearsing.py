"""A rehearsal in a process of its own: a request as JSON on standard input, JSON lines on standard output.

Each stage is told before it is played ({"playing": TEXT}); the last line is the answer.

`python -m batchgen.execute.rehearsing`. The command line stays without torch, and one rehearsal's memory is gone with its process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

from batchgen.errors import BatchgenError

# Adapters: no rehearsal needs them, and importing them takes as long as importing a model's own code.
_NOT_NEEDED = ("peft",)


def main() -> int:
    """0 with {"rehearsed": ...}, or 2 with {"error": TEXT}."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the libraries print belongs on standard error
    try:
        answer: dict[str, Any] = {"rehearsed": _rehearse(request, partial(_tell, out))}
        code = 0
    except BatchgenError as error:
        answer, code = {"error": str(error)}, 2
    except Exception as error:  # noqa: BLE001  a model that cannot be rehearsed is planned by its weights alone
        answer, code = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}, 2
    json.dump(answer, out)
    out.close()
    return code


def _end_with_parent(parent: int) -> None:
    """Nobody waits for the answer of a plan that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _tell(out: TextIO, playing: str) -> None:
    out.write(json.dumps({"playing": playing}) + "\n")
    out.flush()


def _rehearse(request: Mapping[str, Any], told: Callable[[str], None]) -> dict[str, Any]:
    for name in _NOT_NEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: the import system says that it is not there
    import torch

    from batchgen.execute import rehearse
    from batchgen.jobs import ShapeKey
    from batchgen.rehearsal.cache import to_json

    torch.set_num_threads(1)
    shapes = [ShapeKey(**{**shape, "inputs": tuple(shape["inputs"])}) for shape in request["shapes"]]
    found = rehearse.rehearse(
        request["path"], request["dtypes"], shapes, request["batches"], prompt=request.get("prompt"), tokens=request.get("tokens", 60),
        tiled=request.get("tiled", False), trust_remote_code=request.get("trust_remote_code", False),
        told=told, other_steps=request.get("other_steps", ()),
    )
    return to_json(found)


if __name__ == "__main__":
    sys.exit(main())
