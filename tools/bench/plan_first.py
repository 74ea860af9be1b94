"""CPU time of the first and the second plan of Qwen-Image at 1024x1024 for a card of 24 GB, beside that of importing the libraries.

    python tools/bench/plan_first.py [--rounds N]

The first plan rehearses the full-size model without weights; the second reads the rehearsal from the cache and loads no torch. CPU
seconds (user + system) of a process and its children, the least of N rounds, interleaved so that a busy moment hits all alike. Aim: the
first under 15 seconds of one core. Writes results/benchmarks/plan_first.json.
"""

from __future__ import annotations

import os
import tempfile

from _frame import MEASURED_ON, ONE_THREAD, cpu_seconds, parser_for, versions, write_record

BASE = "import torch, diffusers, transformers"
# what a script that rehearses nothing loads for its pipeline: the libraries import their parts only when they are asked for
PIPELINE = "import torch; from diffusers import QwenImagePipeline"
PLAN = ("plan", "--model", "Qwen/Qwen-Image", "--gpu", "RTX 4090", "--size", "1024x1024")
AIM_SECONDS = 15.0
HEAVY = ("torch", "diffusers", "transformers", "pandas")
TOLD = f"""
import sys
from batchgen.cli.main import main
sys.argv = ["batchgen", *{PLAN!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""


def measure(rounds: int) -> dict[str, float]:
    """Least CPU seconds of each."""
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | ONE_THREAD | {"HF_HOME": f"{place}/hub"}
        times: dict[str, list[float]] = {"base": [], "pipeline": [], "first": [], "second": []}
        for number in range(rounds):
            environment["BATCHGEN_CACHE"] = f"{place}/cache {number}"
            for name, code in (("base", BASE), ("pipeline", PIPELINE), ("first", TOLD), ("second", TOLD)):
                times[name].append(cpu_seconds(["-c", code], environment))
    return {name: min(found) for name, found in times.items()}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    times = measure(rounds)
    record = {
        "what": f"CPU time of `batchgen {' '.join(PLAN)}`, divided by that of `python -c '{BASE}'` and of `{PIPELINE}`, "
                f"least of {rounds} rounds each, one run",
        "command": "python tools/bench/plan_first.py",
        "aim": f"the first plan under {AIM_SECONDS:g} CPU seconds; the second loads none of {', '.join(HEAVY)}",
        "ratios": {name: round(times[name] / times["base"], 2) for name in ("pipeline", "first", "second")},
        "cpu_seconds": {name: round(found, 2) for name, found in times.items()},
        "within_aim": times["first"] < AIM_SECONDS,
        "versions": versions(),
        "load_average": round(os.getloadavg()[0], 1),  # of the minute at the end; a busy machine's CPU seconds do less
        **MEASURED_ON,
    }  # fmt: skip
    write_record("plan_first", record)
    for name, seconds in times.items():
        print(f"{seconds:6.2f} s  {seconds / times['base']:5.2f}  {name}")


if __name__ == "__main__":
    main()
