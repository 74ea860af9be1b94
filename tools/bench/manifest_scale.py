"""`batchgen check` of a million-row CSV and JSONL: peak memory, and CPU time against one bare pass of the parser over the same file.

    python tools/bench/manifest_scale.py [--rows N] [--rounds N]

Each pass is a process of its own: csv.reader over the file, json.loads of every line, and the library's `check` of either. CPU seconds are
those of the pass alone (imports left out), the least of the rounds, bare and checked passes interleaved; peak memory is the process's,
imports and all. Aims: under 700 MB, under 5 times the bare pass. Writes results/benchmarks/manifest_scale.json.
"""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _frame import MEASURED_ON, parser_for, write_record

AIMS = {"peak_mb": 700, "ratio": 5.0}
COLUMNS = ("id", "prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "category")
WORDS = (
    "a", "red", "blue", "kite", "over", "the", "grey", "sea", "lake", "with", "warm", "light", "photo", "of", "an", "old", "castle",
)
TAIL = """
import resource, sys, time
begin = time.process_time()
{work}
seconds = time.process_time() - begin
print(rows, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024 * 1024))
"""
BARE_CSV = "import csv\n" + TAIL.format(work="""
rows = -1
with open(sys.argv[1], encoding="utf-8", newline="") as file:
    for row in csv.reader(file):
        rows += 1
""")
BARE_JSON = "import json\n" + TAIL.format(work="""
rows = 0
with open(sys.argv[1], encoding="utf-8", newline="\\n") as file:
    for line in file:
        json.loads(line)
        rows += 1
""")
CHECK = "from batchgen.manifest import ManifestOptions, check\n" + TAIL.format(work="rows = check(sys.argv[1], ManifestOptions()).jobs")
PASSES = {"csv": (BARE_CSV, CHECK), "jsonl": (BARE_JSON, CHECK)}


def rows_of(count: int) -> Iterator[dict[str, object]]:
    """Rows as a data set's list has them: an own id and seed each, prompts of 6 to 30 words, a few dozen shapes."""
    chance = random.Random(7)
    for number in range(count):
        prompt = " ".join(chance.choices(WORDS, k=chance.randint(6, 30))) + (", 8k" if number % 3 == 0 else "")
        yield {
            "id": f"img-{number:07d}", "prompt": prompt, "negative_prompt": "blurry, low quality" if number % 2 else "",
            "seed": chance.getrandbits(64), "width": chance.choice((512, 768, 1024)), "height": chance.choice((512, 768, 1024)),
            "steps": chance.choice((20, 30)), "guidance": chance.choice((3.5, 7)), "category": chance.choice("abc"),
        }


def write_files(folder: Path, count: int) -> dict[str, Path]:
    paths = {kind: folder / f"rows.{kind}" for kind in PASSES}
    with paths["csv"].open("w", encoding="utf-8", newline="") as table, paths["jsonl"].open("w", encoding="utf-8") as lines:
        writer = csv.DictWriter(table, COLUMNS)
        writer.writeheader()
        for row in rows_of(count):
            writer.writerow(row)
            lines.write(json.dumps(row) + "\n")
    return paths


def one_pass(code: str, path: Path, count: int) -> tuple[float, float]:
    """(CPU seconds, peak MB) of a pass in its own process. Raises RuntimeError if it saw another number of rows."""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    rows, seconds, peak = done.stdout.split()
    if int(rows) != count:
        raise RuntimeError(f"{path.name}: {rows} rows instead of {count}")
    return float(seconds), float(peak)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as folder:
        for kind, path in write_files(Path(folder), given.rows).items():
            found = [[one_pass(code, path, given.rows) for code in PASSES[kind]] for _ in range(given.rounds)]
            bare, checked = (min(seconds for seconds, _ in passes) for passes in zip(*found, strict=True))
            results[kind] = {
                "file_bytes": path.stat().st_size, "ratio": round(checked / bare, 2), "peak_mb": round(max(run[1][1] for run in found)),
            }
            print(f"{kind}: {results[kind]['ratio']:.2f} times the bare pass, {results[kind]['peak_mb']} MB at most")
    record = {
        "what": f"check of {given.rows:,} rows: CPU time over that of a bare parsing pass (least of {given.rounds}, one run); peak memory",
        "command": "python tools/bench/manifest_scale.py",
        "aims": AIMS,
        "results": results,
        "within_aims": all(found[name] < aim for found in results.values() for name, aim in AIMS.items()),
        **MEASURED_ON,
    }
    write_record("manifest_scale", record)


if __name__ == "__main__":
    main()
