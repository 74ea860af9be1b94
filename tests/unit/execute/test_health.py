"""Which device leaves the queue, and which does not."""

from __future__ import annotations

from batchgen.execute.health import MAX_FRUITLESS_IN_ALL, Health

KIND = ("denoise", "64x64")


def batches(health: Health, seat: int, *seconds: float) -> None:
    for value in seconds:
        health.batch(seat, KIND, value, 1)


def test_a_device_on_which_nothing_begins_leaves_where_others_begin() -> None:
    health = Health()
    for _ in range(3):
        assert health.verdict(0, [1]) is None
        health.died(0, (), known_killers=False)
    found = health.verdict(0, [1])
    assert found is not None
    assert "3 times in a row before a batch began" in found[0]
    assert health.verdict(0, []) is None, "the last one never leaves"


def test_a_model_that_begins_nowhere_is_no_devices_fault() -> None:
    health = Health()
    for _ in range(3):
        for seat in (0, 1):
            health.died(seat, (), known_killers=False)
    assert health.verdict(0, [1]) is None


def test_a_device_that_dies_on_job_after_job_leaves_and_its_jobs_are_not_blamed() -> None:
    health = Health()
    health.picture(1)
    for key in ("a", "b", "c"):
        assert health.verdict(0, [1]) is None
        health.died(0, (key,), known_killers=False)
    assert health.verdict(0, [1]) is not None
    assert health.blamed(0) == {"a", "b", "c"}


def test_jobs_that_end_any_worker_are_no_devices_fault() -> None:
    health = Health()
    health.picture(1)
    for key in ("a", "b", "c", "d"):
        health.died(0, (key,), known_killers=True)
    assert health.verdict(0, [1]) is None


def test_a_picture_between_two_deaths_clears_the_device() -> None:
    health = Health()
    health.picture(1)
    for key in "abcdef":
        health.died(0, (key,), known_killers=False)
        health.picture(0)
    assert health.verdict(0, [1]) is None
    assert health.blamed(0) == set()


def test_a_device_that_becomes_slow_leaves_after_some_batches() -> None:
    health = Health()
    for seat in (0, 1):
        batches(health, seat, *[1.0] * 5)
        health.picture(seat)
    batches(health, 0, 9.0, 9.0)
    assert health.verdict(0, [1]) is None
    batches(health, 0, 9.0)
    found = health.verdict(0, [1])
    assert found is not None
    assert "more than 4 times" in found[0]
    assert health.verdict(1, [0]) is None


def test_what_stays() -> None:
    """One slow batch; a device slow from the start; all slow together, as beside another program."""
    health = Health()
    for seat in (0, 1, 2):
        health.picture(seat)
    batches(health, 0, 1, 1, 1, 9, 1, 9, 1, 9, 1)
    batches(health, 1, *[12.0] * 9)
    assert health.verdict(0, [1, 2]) is None
    assert health.verdict(1, [0, 2]) is None
    both = Health()
    for _ in range(5):
        batches(both, 0, 1.0)
        batches(both, 1, 1.0)
    for _ in range(5):
        batches(both, 0, 9.0)
        batches(both, 1, 9.0)
        both.picture(0)
        both.picture(1)
    assert both.verdict(1, [0]) is None


def test_other_shapes_say_nothing() -> None:
    health = Health()
    for seat in (0, 1):
        batches(health, seat, *[1.0] * 5)
        health.picture(seat)
    for _ in range(5):
        health.batch(0, ("denoise", "1024x1024"), 99.0, 1)
    assert health.verdict(0, [1]) is None


def test_a_run_in_which_nothing_begins_anywhere_is_hopeless() -> None:
    health = Health()
    for seat in (0, 1, 0):
        assert not health.hopeless([0, 1])
        health.died(seat, (), known_killers=False)
    assert health.hopeless([0, 1])
    assert not health.hopeless([0, 1, 2]), "the third device has not failed"
    health.began(1)
    assert not health.hopeless([0, 1])


def test_deaths_without_a_picture_make_a_run_hopeless_in_the_end_and_are_all_suspected() -> None:
    health = Health()
    for number in range(MAX_FRUITLESS_IN_ALL):
        assert not health.hopeless([0, 1])
        health.died(number % 2, (f"job{number}",), known_killers=True)
    assert health.hopeless([0, 1])
    assert len(health.suspected) == MAX_FRUITLESS_IN_ALL
    health.picture(0)
    assert (health.hopeless([0, 1]), health.suspected) == (False, set())


def test_machines_that_go_and_devices_that_leave_make_no_run_hopeless() -> None:
    gone, left = Health(), Health()
    for number in range(2 * MAX_FRUITLESS_IN_ALL):
        gone.died(0, (), known_killers=False, lost=True)
        left.died(0, (f"job{number}",), known_killers=False)
        left.left()
    assert not gone.hopeless([0])
    assert not left.hopeless([0])
