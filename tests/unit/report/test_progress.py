"""The progress display: forecasts, plain lines without a terminal (field case B61), and a stderr that goes away."""

from __future__ import annotations

import io

import pytest

from batchgen.events import Event, JobFailed, OutputDone, StageBatchDone, WorkerDied, WorkerReady, WorkerReplaced, WorkerStopped
from batchgen.report.progress import DownloadLines, LiveBar, Pace, PlainLines, Silent, open_display


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


READY = WorkerReady(0, 1, "cpu", ("text_encoder", "denoise", "decode"), (), "stages", 2.0)


def batch(stage: str, jobs: int, seconds: float) -> StageBatchDone:
    return StageBatchDone(0, 0, stage, "64x64", tuple(f"k{n}" for n in range(jobs)), jobs, seconds)


def output(key: str = "k0") -> OutputDone:
    return OutputDone(0, key, "a.png", 1, "0" * 64, 1, 1.0, "{}")


def feed(display: PlainLines | LiveBar | Silent, batches: int, per_batch: int) -> None:
    display.listen(READY)
    for _ in range(batches):
        for stage in READY.stages:
            display.listen(batch(stage, per_batch, 1.0))
        for n in range(per_batch):
            display.listen(output(f"k{n}"))


def test_no_forecast_before_every_stage_was_seen() -> None:
    pace = Pace(10, clock=Clock())
    pace.listen(READY)
    assert pace.remaining_seconds is None
    pace.listen(batch("text_encoder", 2, 1.0))
    pace.listen(batch("denoise", 2, 8.0))
    assert pace.remaining_seconds is None
    pace.listen(batch("decode", 2, 1.0))
    assert pace.remaining_seconds == pytest.approx(8 * (0.5 + 4.0 + 0.5))


def test_work_done_ahead_in_early_stages_is_not_forecast_again() -> None:
    pace = Pace(10, clock=Clock())
    for event in (batch("text_encoder", 10, 5.0), batch("denoise", 5, 20.0), batch("decode", 5, 5.0)):
        pace.listen(event)
    assert pace.remaining_seconds == pytest.approx(5 * 4.0 + 5 * 1.0)


def test_two_workers_halve_the_forecast() -> None:
    pace = Pace(10, workers=2, clock=Clock())
    pace.listen(batch("pipeline", 2, 4.0))
    assert pace.remaining_seconds == pytest.approx(8 * 2.0 / 2)


def test_rate_counts_this_session_alone() -> None:
    clock = Clock()
    pace = Pace(100, done=90, clock=clock)
    clock.now = 60.0
    assert pace.per_minute is None
    pace.listen(output())
    pace.listen(output())
    assert pace.per_minute == pytest.approx(2.0)
    assert pace.done == 92


def test_a_failure_to_be_tried_again_is_not_counted() -> None:
    pace = Pace(2, clock=Clock())
    pace.listen(JobFailed(0, "k", "error", "denoise", "x", retry=True))
    assert pace.failed == 0
    pace.listen(JobFailed(0, "k", "error", "denoise", "x"))
    assert pace.failed == 1


def test_outputs_found_on_disk_are_done_but_no_work_of_this_session() -> None:
    clock = Clock()
    pace = Pace(10, done=2, clock=clock)
    pace.rebase(done=5, failed=1)
    clock.now = 60.0
    assert pace.per_minute is None
    pace.listen(output())
    assert (pace.done, pace.failed, pace.per_minute) == (6, 1, pytest.approx(1.0))


def test_finished_is_zero_left() -> None:
    pace = Pace(1, clock=Clock())
    pace.listen(output())
    assert pace.remaining_seconds == 0.0


def test_without_a_terminal_there_is_a_line_a_batch_and_no_control_character() -> None:
    stream = io.StringIO()
    with open_display(Pace(20, clock=Clock()), stream=stream) as display:
        assert isinstance(display, PlainLines)
        feed(display, batches=5, per_batch=4)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 5 * 3 + 1  # the worker, every batch of every stage, the end
    assert not any(char in stream.getvalue() for char in "\r\x1b")
    assert lines[3].endswith("decode: 4 of 64x64 in 1.0 s; 0/20 done, 12 s left")
    assert lines[-1].endswith("20/20 done")


def test_line_count_does_not_grow_with_the_pictures_of_a_batch() -> None:
    def count(per_batch: int) -> int:
        stream = io.StringIO()
        with open_display(Pace(5 * per_batch, clock=Clock()), stream=stream) as display:
            feed(display, batches=5, per_batch=per_batch)
        return len(stream.getvalue().splitlines())

    assert count(2) == count(50)


def test_a_reason_cannot_move_the_cursor() -> None:
    stream = io.StringIO()
    PlainLines(Pace(1, clock=Clock()), stream).listen(JobFailed(0, "k" * 8, "error", "denoise", "bad\r\x1b[2Jline\nnext"))
    assert len(stream.getvalue().splitlines()) == 1
    assert not any(char in stream.getvalue() for char in "\r\x1b")


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_dumb_terminal_gets_lines(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    assert isinstance(open_display(Pace(1, clock=Clock()), stream=Terminal()), PlainLines)


def test_a_terminal_gets_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with open_display(Pace(8, clock=Clock()), stream=stream) as display:
        assert isinstance(display, LiveBar)
        feed(display, batches=2, per_batch=4)
    assert "8/8 done" in stream.getvalue()


def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with open_display(Pace(8, clock=Clock()), stream=stream) as display:
        feed(display, batches=2, per_batch=4)
    assert "\x1b[3" not in stream.getvalue()


@pytest.mark.parametrize("columns", ["1", "10", "30", "59"])
def test_a_narrow_terminal_does_not_break_it(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    with open_display(Pace(8, clock=Clock()), stream=stream) as display:
        feed(display, batches=2, per_batch=4)
    assert stream.getvalue()


def test_quiet_says_nothing_and_counts() -> None:
    stream = io.StringIO()
    pace = Pace(8, clock=Clock())
    with open_display(pace, quiet=True, stream=stream) as display:
        feed(display, batches=2, per_batch=4)
    assert stream.getvalue() == ""
    assert pace.done == 8


@pytest.mark.parametrize("terminal", [True, False])
def test_a_stderr_that_goes_away_does_not_stop_the_run(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Gone(Terminal):
        broken = False

        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().write(text)

    stream = Gone()
    pace = Pace(8, clock=Clock())
    with open_display(pace, stream=stream) as display:
        stream.broken = True
        feed(display, batches=2, per_batch=4)
    assert pace.done == 8


def test_a_download_without_a_terminal_is_a_line_a_twentieth() -> None:
    stream, clock = io.StringIO(), Clock()
    show = DownloadLines("a/model", stream=stream, clock=clock)
    for part in range(1001):
        clock.now = part / 10
        show(part * 2**20, 1000 * 2**20)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 21
    assert lines[10] == "downloading a/model: 500.0 MiB of 1000.0 MiB, 10.0 MiB/s, 50 s left"
    assert lines[-1].startswith("downloading a/model: 1000.0 MiB of 1000.0 MiB")
    assert not any(char in stream.getvalue() for char in "\r\x1b")


def test_a_download_on_a_terminal_stays_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), Clock()
    show = DownloadLines("a/model", stream=stream, clock=clock)
    for part in range(101):
        clock.now = part / 10
        show(part, 100)
    assert stream.getvalue().count("\n") == 1


def test_a_quiet_download_says_nothing() -> None:
    stream = io.StringIO()
    DownloadLines("a/model", quiet=True, stream=stream)(1, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (WorkerDied(1, 7, "killed by SIGSEGV", "denoise", ("a", "b")), "worker 1 died, with 2 jobs in denoise: killed by SIGSEGV"),
        (WorkerDied(1, 7, "ended with exit code 3", "", ()), "worker 1 died: ended with exit code 3"),
        (WorkerReplaced(0, 3 * 2**30, 2**30), "worker 0 had grown to 3.00 GiB and is replaced"),
        (WorkerStopped(0, "the disk is full"), "worker 0 stopped: the disk is full"),
        (WorkerStopped(0, None), None),
    ],
)
def test_what_befalls_a_worker_is_said(event: Event, line: str | None) -> None:
    stream = io.StringIO()
    PlainLines(Pace(1, clock=Clock()), stream, now=lambda: "07:00:00").listen(event)
    assert stream.getvalue() == ("" if line is None else f"07:00:00 {line}\n")
