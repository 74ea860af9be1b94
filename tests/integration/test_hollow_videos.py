"""The rehearsal held against real runs, video families: the same stages, the same tracker, over hollow and over loaded components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hollow_twins import assert_equal_to_the_byte

QUICK, REST = ["wan21", "ltx"], ["wan22", "wan21_i2v", "wan22_i2v", "wan22_ti2v", "ltx2", "hunyuan_video15"]


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.long) for family in REST)])
def test_pitfall_19_a_hollow_run_has_the_peaks_of_a_real_one_to_the_byte(family: str, tiny_folder: Callable[[str], Path]) -> None:
    assert_equal_to_the_byte(family, tiny_folder(family))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "inputs"),
    [("wan21_flf2v", ("image", "last_image")), ("hunyuan_video15_i2v", ("image",)), ("wan22_ti2v", ("image",)), ("ltx2", ("image",))],
)
def test_a_hollow_clip_from_pictures_has_the_peaks_of_a_real_one_to_the_byte(
    family: str, inputs: tuple[str, ...], tiny_folder: Callable[[str], Path],
) -> None:
    assert_equal_to_the_byte(family, tiny_folder(family), inputs)
