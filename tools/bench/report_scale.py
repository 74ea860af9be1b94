"""A report of 100,000 jobs: the memory it is made with, and that it opens. Aim: under 400 MB, and no more than twice that of 1,000 jobs.

    python tools/bench/report_scale.py [--jobs N]

Run folders of 1,000, 10,000 and N jobs with two workers' timeline over a night; pictures of 256 by 256 are hard links to a few hundred.
`batchgen report` runs in a process of its own, whose peak memory is read at its end (VmHWM). Where Chromium and its driver are
installed, the largest page is opened from disk: the gallery's first and last page, a search, a picture in full, nothing asked of the
network, no error on the console. Writes results/benchmarks/report_scale.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from _frame import MEASURED_ON, parser_for, write_record

AIM_BYTES = 400_000_000
PICTURES = 256
SIDE = 256
SUBJECTS = ("a lighthouse at dusk", "a red fox in fresh snow", "a harbour with forty boats", "an old town seen from the hill")

# The command, which tells its own peak memory at its end.
DRIVER = """
import sys, time
from batchgen.cli.main import run
code = run(sys.argv[1:])
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(code, peak, time.process_time(), file=sys.stderr)
"""


def make_run(path: Path, count: int) -> Path:
    from batchgen.events import Event, JobFailed, OutputDone
    from batchgen.journal import Journal
    from batchgen.outputs.image import write_image
    from batchgen.runfolder import RunFolder
    from reportkit import MEASURED, PLAN, as_a_night, job

    folder = RunFolder(path.absolute())
    folder.prepare()
    folder.run_json.write_text(json.dumps({"model": {"source": "builtin", "revision": "0" * 40}, "plan": PLAN}))
    (folder.tables / "measured.json").write_text(json.dumps(MEASURED))
    base, noise = path / "base", np.random.default_rng(0)
    base.mkdir()
    made = []
    for number in range(min(PICTURES, count)):
        small = noise.integers(0, 256, (8, 8, 3), np.uint8)
        pixels, file = np.kron(small, np.ones((SIDE // 8, SIDE // 8, 1), np.uint8)), base / f"{number}.png"
        made.append((file, *write_image(pixels, file, {"prompt": "x"}, "png", {})))
    jobs = (job(number, f"{SUBJECTS[number % 4]}, number {number}, oil on canvas, thick strokes, warm light from the left",
                width=(64, 96, 128)[number % 3]) for number in range(count))

    def ended(number: int, key: str, output: str) -> Event:
        if number % 199 == 7:
            return JobFailed(0, key, "non-finite", "denoise", f"not a number in step {number % 5}")
        source, size, sha = made[number % len(made)]
        os.link(source, folder.outputs / output)
        return OutputDone(number % 2, key, output, size, sha, 4, 2.5, "{}")

    with Journal.open(folder.journal) as journal:
        journal.begin_run()
        journal.ingest(jobs)
        stream = iter([(row["index"], row["key"], row["output"]) for row in journal.rows()])
        while part := list(islice(stream, 2000)):
            journal.record([ended(*row) for row in part])
        journal.end_run(None)
    as_a_night(folder)
    return path


def report(path: Path) -> dict[str, Any]:
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", DRIVER, "report", str(path)], capture_output=True, text=True, check=False)
    words = ran.stderr.split()
    if ran.returncode or len(words) != 3 or words[0] != "0":
        raise SystemExit(f"the report was not made:\n{ran.stderr}")
    return {
        "peak_bytes": int(words[1]), "cpu_seconds": round(float(words[2]), 1), "wall_seconds": round(time.monotonic() - began, 1),
        "page_bytes": (path / "report.html").stat().st_size,
    }


def opened(page: Path, count: int) -> dict[str, Any] | str:
    """What a browser makes of the page, or why none was asked."""
    browser, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver_path:
        return "not opened: no Chromium with its driver here"
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                 "--window-size=1280,1600"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver_path))
    try:
        driver.set_page_load_timeout(300)
        driver.get(page.as_uri())
        place = lambda: driver.find_element("id", "place").text  # noqa: E731
        tiles = lambda: len(driver.find_elements("css selector", ".tile"))  # noqa: E731
        found: dict[str, Any] = {"first_page": place(), "tiles": tiles()}
        # a page of which no thumbnail is inside: the files themselves are shown
        driver.execute_script("page = 1e9; draw()")
        drawn = "return [...document.querySelectorAll('.tile img')].every(image => image.complete && image.naturalWidth > 0)"
        WebDriverWait(driver, 60).until(lambda _: driver.execute_script(drawn))
        found |= {"last_page": place(), "tiles_of_the_last": tiles()}
        driver.find_element("id", "text").send_keys(f"number {count - 3},")
        found["found_by_text"] = tiles()
        driver.find_elements("css selector", ".tile")[0].click()
        found["full_size_opens"] = driver.find_element("id", "full").get_attribute("open") is not None
        sent = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        urls = [entry["params"]["request"]["url"] for entry in sent if entry["method"] == "Network.requestWillBeSent"]
        found["asked_of_the_network"] = sum(not url.startswith(("file:", "data:", "chrome:")) for url in urls)
        found["console_errors"] = sum(entry["level"] == "SEVERE" for entry in driver.get_log("browser"))
        heap = driver.execute_script("return performance.memory ? performance.memory.usedJSHeapSize : 0")
        return found | {"browser": driver.capabilities["browserVersion"], "script_heap_bytes": heap}
    finally:
        driver.quit()


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--no-record", action="store_true", help="Print, and leave the committed record alone.")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        for count in sorted({1000, 10_000, given.jobs}):
            path = make_run(Path(place) / f"run-{count}", count)
            found[str(count)] = report(path)
            print(count, found[str(count)], flush=True)
        browser = opened(path / "report.html", given.jobs)
    largest, smallest = found[str(given.jobs)], found["1000"]
    record = {
        "what": "batchgen report of run folders with that many jobs, in a process of its own; then the largest page in a browser",
        "command": "python tools/bench/report_scale.py", "aim_peak_bytes": AIM_BYTES, "reports": found,
        "within_aim": largest["peak_bytes"] < AIM_BYTES and largest["peak_bytes"] < 2 * smallest["peak_bytes"],
        "peak_against_1000_jobs": round(largest["peak_bytes"] / smallest["peak_bytes"], 2),
        "opened": browser, "python": MEASURED_ON["python"],
    }
    print(json.dumps(record, indent=2))
    if not given.no_record:
        write_record("report_scale", record)


if __name__ == "__main__":
    main()
