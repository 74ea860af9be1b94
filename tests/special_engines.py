"""The real engine in special circumstances, for workers started by factory_run.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

from batchgen.execute.engine import Engine, open_engine
from batchgen.outputs import video

CLIP, FRAME = 4, 3  # the fourth clip is cut off at its third frame


def killed_while_encoding(*arguments: Any) -> Engine:
    """Supervisor and worker end by SIGKILL in the middle of a clip."""
    checked, begun = video._checked, iter(range(1, 1000))

    def cut_off(frames: Iterable[Any]) -> Iterator[Any]:
        clip = next(begun)
        for number, frame in enumerate(checked(frames), start=1):
            if (clip, number) == (CLIP, FRAME):
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            yield frame

    video._checked = cut_off  # type: ignore[assignment]
    return open_engine(*arguments)


def with_stand_in_processor(*arguments: Any) -> Engine:
    """Qwen-Image-Edit's processor is made without its video half, where torchvision is not installed."""
    import tiny

    tiny.stand_in_processor().__enter__()  # for the life of this process
    return open_engine(*arguments)
