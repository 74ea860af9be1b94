"""Bytes of weights moved for a list of prompts: batchgen's windows against diffusers' model offload, prompt by prompt.

    python tools/bench/bytes_moved.py [--prompts N]

Every component is offloaded whole. batchgen's bytes are counted where they are copied, over the real engine and the supervisor's own
windows. The other side follows from the pipeline's own `model_cpu_offload_seq`: every component of it is copied in and out again for every
prompt. Counted, not timed: the figures are the same on every machine. Aim: under 3 %. Writes results/benchmarks/bytes_moved.json.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

from _frame import ONE_THREAD, parser_for, versions, write_record

os.environ.update(ONE_THREAD)
AIM = 0.03
FAMILIES = ("qwen_image", "z_image", "sdxl", "flux", "wan22")


def pipeline_bytes(folder: Path, prompts: int) -> int:
    """What model offload copies: the pipeline's own sequence, in and out, once a prompt; tied weights once."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), local_files_only=True)
    names = pipe.model_cpu_offload_seq.split("->")
    parts = [getattr(pipe, name) for name in names if getattr(pipe, name, None) is not None]
    return prompts * 2 * sum(parameter.nbytes for part in parts for parameter in part.parameters())


def our_bytes(folder: Path, run_folder: Path, prompts: int, clip: bool) -> tuple[int, dict[str, int], list[int]]:
    """(all bytes copied, per component, the windows' sizes)."""
    enginekit: Any = importlib.import_module("enginekit")
    from batchgen.events import OutputDone
    from batchgen.execute.load import ModelFolder
    from batchgen.execute.settings import Window
    from batchgen.execute.supervisor import window_sizes

    plan = enginekit.make_plan(folder, modes=dict.fromkeys(ModelFolder.read(folder).models, "component-offload"))
    ran = enginekit.Ran()
    engine = enginekit.engine_for(folder, run_folder, ran, plan=plan)
    shape = {"num_frames": 5, "output": None} if clip else {}
    jobs = []
    for number in range(prompts):
        output = {"output": f"{number:03d}.{'mp4' if clip else 'png'}"}
        jobs.append(enginekit.make_job(number, f"picture number {number} of a red circle", steps=2, **(shape | output)))
    first, size = window_sizes(plan)
    windows = [jobs[:first]] + [jobs[start : start + size] for start in range(first, prompts, size)]
    for number, window in enumerate(windows):
        engine.run_window(Window(number, tuple(window)))
    engine.products.finish()
    assert len(ran.of(OutputDone)) == prompts, [event.reason for event in ran.failed]
    moved = dict(engine.residency.bytes_in)
    engine.close()
    return sum(moved.values()), moved, [len(window) for window in windows]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    prompts = parser.parse_args().prompts
    import tiny

    found: dict[str, Any] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stderr(io.StringIO()):
            folder = Path(place) / family
            getattr(tiny, family)(folder)
            ours, per_component, windows = our_bytes(folder, Path(place) / "run", prompts, family.startswith("wan"))
            theirs = pipeline_bytes(folder, prompts)
        found[family] = {
            "batchgen_bytes": ours, "per_component": per_component, "windows": windows, "model_offload_bytes": theirs,
            "ratio": round(ours / theirs, 4), "within_aim": ours <= AIM * theirs,
        }
        print(f"{family}: {ours:,} of {theirs:,} bytes, {ours / theirs:.2%}")
    record = {
        "what": "bytes of weights copied with every component offloaded, divided by those of diffusers' model offload",
        "command": "python tools/bench/bytes_moved.py", "prompts": prompts, "aim": AIM,
        "versions": versions(), "models": found,
    }
    write_record("bytes_moved", record)


if __name__ == "__main__":
    main()
