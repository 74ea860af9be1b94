"""The rehearsal held against real runs, picture families: the same stages, the same tracker, over hollow and over loaded components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hollow_twins import assert_equal_to_the_byte

QUICK, REST = ["z_image", "flux", "sd3", "qwen_image"], ["sdxl", "flux2_klein", "lumina2", "pixart_sigma"]


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.long) for family in REST)])
def test_pitfall_19_a_hollow_run_has_the_peaks_of_a_real_one_to_the_byte(family: str, tiny_folder: Callable[[str], Path]) -> None:
    assert_equal_to_the_byte(family, tiny_folder(family))
