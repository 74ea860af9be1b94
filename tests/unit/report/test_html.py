"""report.html and the other forms of a report, from a journal and real pictures."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import sys

import pytest

from batchgen.cli.finishing import write_jobs_table
from batchgen.journal import Journal
from batchgen.report import textforms
from batchgen.report.charts import LANES_SHOWN, night_chart
from batchgen.report.html import write_contact_sheet, write_report
from batchgen.report.timeline import Lane, Series
from reportkit import as_a_night, finished_run, skip_rows

NASTY = [
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "{{ 7*7 }} {% raw %} ${x} %s",
    "שלום עולם",
    "🦊" * 30,
    "long " * 1000,
    "a plain one",
]


@pytest.fixture
def run(tmp_path):
    return finished_run(tmp_path / "night <1>", NASTY, failed=[2], clips=[6])


def embedded_jobs(text):
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S).group(1))


def test_every_job_is_in_the_page_with_its_text_verbatim(run):
    found = embedded_jobs(write_report(run).read_text("utf-8"))
    assert [job["prompt"] for job in found] == NASTY
    assert found[0]["seed"] == str(2**64 - 1)
    assert [job["state"] for job in found] == ["done", "done", "failed", "done", "done", "done", "done"]


def test_prompts_and_reasons_never_become_elements(run):
    text = write_report(run).read_text("utf-8")
    assert text.count("<script") == 2  # the jobs and the gallery, both ours
    assert "<img src=x" not in text
    assert "night &lt;1&gt;" in text
    assert "24 &lt; 45" in text


def test_the_page_names_nothing_on_the_network(run):
    text = write_report(run).read_text("utf-8")
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", text)
    assert "default-src 'none'" in text


def test_pictures_have_small_copies_inside_and_clips_do_not(run):
    found = embedded_jobs(write_report(run).read_text("utf-8"))
    assert found[0]["thumb"].startswith("data:image/webp;base64,")
    assert "thumb" not in found[6]
    assert found[6]["href"] == "outputs/000006.mp4"
    assert "href" not in found[2]


def test_the_command_that_makes_a_picture_again_is_quoted_for_a_shell(run):
    found = embedded_jobs(write_report(run).read_text("utf-8"))
    assert found[0]["again"] == f"batchgen rerender '{run.outputs / '000000.png'}'"


def test_a_picture_that_is_gone_costs_its_thumbnail_only(run):
    (run.outputs / "000001.png").unlink()
    found = embedded_jobs(write_report(run).read_text("utf-8"))
    assert "thumb" not in found[1]
    assert "thumb" in found[3]


def test_a_run_without_plan_or_pictures_still_reports(tmp_path):
    folder = finished_run(tmp_path / "empty", ["a", "b"], failed=[0, 1])
    folder.run_json.write_text("{}")
    assert len(embedded_jobs(write_report(folder).read_text("utf-8"))) == 2
    assert write_contact_sheet(folder) is None


def test_csv_holds_every_job_verbatim(run):
    csv.field_size_limit(sys.maxsize)
    rows = list(csv.DictReader(io.StringIO("".join(textforms.lines(run, "csv")))))
    assert [row["prompt"] for row in rows] == NASTY
    assert rows[0]["seed"] == str(2**64 - 1)
    assert rows[2]["state"] == "failed"


def test_json_holds_the_sums(run):
    found = json.loads("".join(textforms.lines(run, "json")))
    assert found["counts"]["done"] == 6
    assert found["failures"][0]["kind"] == "non-finite"
    assert found["plan"]["placements"]["vae"]["mode"] == "resident"
    assert found["failures"][0]["rows"] == [4]
    as_a_night(run)
    found = json.loads("".join(textforms.lines(run, "json")))
    assert found["rendering_seconds"] == 6 * 3600
    assert [lane["worker"] for lane in found["timeline"]] == [0, 1]


def test_markdown_escapes_what_it_quotes(run):
    text = "".join(textforms.lines(run, "md"))
    assert "| 1 | non\\-finite | denoise |" in text
    assert "<img" not in text


def test_rows_that_were_skipped_are_in_every_form_of_the_report(tmp_path):
    folder = finished_run(tmp_path / "some", ["a", "b"])
    skip_rows(folder, 3)
    markdown = "".join(textforms.lines(folder, "md"))
    assert "builtin, 2 jobs: 2 done; 3 invalid rows skipped\n" in markdown
    assert markdown.count("steps: 'many' is \\| not a number |\n") == 3
    assert "| 10 |  | steps" in markdown
    asked = list(csv.DictReader(io.StringIO("".join(textforms.lines(folder, "csv")))))
    with Journal.read(folder.journal) as journal:
        write_jobs_table(folder, journal)
    kept = list(csv.DictReader(io.StringIO((folder.tables / "jobs.csv").read_text("utf-8"))))
    for rows in (asked, kept):
        assert [(row["row"], row["state"], row["kind"]) for row in rows if row["kind"]] == [
            (str(line), "failed", "invalid row") for line in (10, 11, 12)
        ]
        assert [row["state"] for row in rows] == ["done", "done", "failed", "failed", "failed"]
    assert [row["row"] for row in json.loads("".join(textforms.lines(folder, "json")))["skipped"]] == [10, 11, 12]
    assert re.search(r"<b class=\"bad\">3</b>invalid rows skipped", write_report(folder).read_text("utf-8"))


def test_markdown_counts_skipped_rows_that_nobody_would_read(tmp_path):
    folder = finished_run(tmp_path / "many", ["a"])
    skip_rows(folder, 205)
    text = "".join(textforms.lines(folder, "md"))
    assert "205 invalid rows skipped" in text
    assert text.count("is \\| not a number") == 200
    assert "| | | and 5 more |" in text


def test_the_contact_sheet_shows_the_pictures(run):
    from PIL import Image

    with Image.open(write_contact_sheet(run)) as sheet:
        assert sheet.width > 500
        assert len(sheet.convert("RGB").getcolors(2**20)) > 5


def charts_of(path):
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', path.read_text("utf-8"))
    return [base64.b64decode(text).decode() for text in pictures]


def test_a_night_has_charts_and_a_short_run_has_none_unless_asked(run):
    assert charts_of(write_report(run)) == []
    as_a_night(run)
    drawn = charts_of(write_report(run))
    assert any("Time in the stages" in svg and "denoise 75 %" in svg for svg in drawn)
    assert all(word in drawn[0] for word in ("What ran when", "worker 0", "worker 1", "loading weights", "Memory", "Outputs a minute"))
    assert "a dashed line is where a run was resumed" in drawn[0]
    assert all("<script" not in svg for svg in drawn)


def test_a_report_that_is_asked_for_has_charts_even_of_a_short_run(tmp_path):
    folder = finished_run(tmp_path / "short", ["a", "b"])
    assert any("Time in the stages" in svg for svg in charts_of(write_report(folder, charts=True)))


def chart(lanes=(), memory=(), rate=(), hours=5.0):
    uri = night_chart(lanes, memory, Series("outputs a minute", rate), hours=hours)
    return base64.b64decode(uri.partition("base64,")[2]).decode()


def test_lines_are_drawn_with_their_names_as_they_are():
    lines = [Series("host, worker $0$", ((0.0, 1.0), (5.0, 2.0))), Series("device <1>", ((0.0, 3.0), (5.0, 3.5))), Series("a point", ((1.0, 1.0),))]
    svg = chart(memory=lines)
    assert "host, worker $0$" in svg
    assert "device &lt;1&gt;" in svg
    assert "a point" not in svg
    assert "hours of rendering" in svg
    assert chart(memory=lines[2:]) == ""


def test_a_cluster_is_drawn_in_part_and_says_so():
    svg = chart([Lane(number, 0.01, (("denoise <x>", (1.0, 0.5)),)) for number in range(LANES_SHOWN + 4)])
    assert "(4 more workers are not drawn)" in svg
    assert "denoise &lt;x&gt;" in svg
    assert svg.count("worker ") == LANES_SHOWN


def test_failures_come_with_lines_of_the_manifest_and_a_way_to_see_them(run):
    text = write_report(run).read_text("utf-8")
    assert '<button class="show" data-reason="&lt;img src=x onerror=alert(1)&gt; is not a number">' in text
    assert "<td>4</td>" in text  # the failed job's line


def test_reasons_beyond_what_anyone_reads_are_counted_not_listed(tmp_path):
    folder = finished_run(tmp_path / "many", [f"p{number}" for number in range(230)], failed=range(230), reason="no. {}")
    text = write_report(folder).read_text("utf-8")
    assert "and 30 more reasons" in text


def test_measured_sums_stand_beside_the_plan(run):
    text = write_report(run).read_text("utf-8")
    assert "component-offload" in text
    assert "2.00 GiB" in text  # moved bytes of the text encoder
