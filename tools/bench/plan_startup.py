"""CPU time of `batchgen plan --policy-only` against that of importing click and rich, in one run. Aim: under three times.

    python tools/bench/plan_startup.py [--rounds N]

CPU seconds of child processes (user + system), the least of N rounds, interleaved so that a busy moment hits all alike. Bytecode is
cached beforehand, as an installed package has it. Writes results/benchmarks/plan_startup.json.
"""

from __future__ import annotations

import os
import tempfile

from _frame import MEASURED_ON, cpu_seconds, parser_for, write_record

BASE = "import click, rich"
HELD = "plan --policy-only"  # the aim is for this one; tables cost what rich costs
AIM = 3.0
COMMANDS: dict[str, list[str]] = {
    BASE: ["-c", BASE],
    "plan --policy-only": ["-m", "batchgen", "plan", "--policy-only"],
    "plan --policy-only --json --gpu 'RTX 4090'": ["-m", "batchgen", "plan", "--policy-only", "--json", "--gpu", "RTX 4090"],
    "plan --policy-only --show-residency": ["-m", "batchgen", "plan", "--policy-only", "--show-residency"],
}


def measure(rounds: int) -> dict[str, float]:
    """Least CPU seconds of each command."""
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        for arguments in COMMANDS.values():
            cpu_seconds(arguments, environment)
        times: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(rounds):
            for name, arguments in COMMANDS.items():
                times[name].append(cpu_seconds(arguments, environment))
    return {name: min(found) for name, found in times.items()}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    times = measure(rounds)
    ratios = {name: round(seconds / times[BASE], 2) for name, seconds in times.items() if name != BASE}
    record = {
        "what": f"CPU time of a command divided by that of `python -c '{BASE}'`, least of {rounds} rounds each, one run",
        "command": "python tools/bench/plan_startup.py",
        "aim": AIM,
        "ratios": ratios,
        "within_aim": ratios[HELD] < AIM,
        **MEASURED_ON,
    }
    write_record("plan_startup", record)
    for name, ratio in ratios.items():
        print(f"{ratio:5.2f}  {name}")


if __name__ == "__main__":
    main()
