"""The rehearsal held against real runs, picture families: the same stages, the same tracker, over hollow and over loaded components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from hollow_twins import assert_equal_to_the_byte

QUICK, REST = ["z_image", "flux", "sd3", "qwen_image"], ["sdxl", "flux2_klein", "lumina2", "pixart_sigma"]


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.long) for family in REST)])
def test_pitfall_19_a_hollow_run_has_the_peaks_of_a_real_one_to_the_byte(family: str, tiny_folder: Callable[[str], Path]) -> None:
    assert_equal_to_the_byte(family, tiny_folder(family))


@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.long) for family in ("flux_kontext", "flux2", "flux2_klein")])
def test_a_hollow_edit_of_a_picture_has_the_peaks_of_a_real_one_to_the_byte(family: str, tiny_folder: Callable[[str], Path]) -> None:
    assert_equal_to_the_byte(family, tiny_folder(family), ("image",))


@pytest.mark.long
@pytest.mark.parametrize("plus", [False, True])
def test_the_hollow_twin_of_qwen_image_edit_has_the_peaks_of_a_real_one_to_the_byte(plus: bool, tmp_path: Path) -> None:
    # it brings every picture to about a million pixels: large enough that a second count of the picture itself would show
    with tiny.stand_in_processor():
        tiny.qwen_image_edit(tmp_path / "edit", plus=plus)
        assert_equal_to_the_byte("qwen_image_edit", tmp_path / "edit", ("image",))
