"""The probe against a real driver: NVML and torch must mean the same cards by the same names."""

from __future__ import annotations

import pytest
import torch

from batchgen.execute.confirm import confirm_device, use_device
from batchgen.inventory.device import probe

pytestmark = pytest.mark.gpu


def test_the_probe_and_torch_agree() -> None:
    platform, devices = probe(None)
    assert platform == "cuda"
    assert len(devices) == torch.cuda.device_count()
    for facts in devices:
        confirm_device(devices, facts.torch_name)
        free, total = torch.cuda.mem_get_info(facts.torch_name)
        assert facts.total_bytes == pytest.approx(total, rel=0.05)
        assert facts.available_bytes == pytest.approx(free, rel=0.1)


def test_a_device_is_found_by_uuid() -> None:
    _platform, devices = probe(None)
    uuid = devices[-1].uuid
    assert uuid is not None
    assert [facts.torch_name for facts in probe([uuid])[1]] == [devices[-1].torch_name]


def test_the_workers_card_becomes_the_current_one() -> None:
    before = torch.cuda.current_device()
    try:
        for facts in probe(None)[1]:
            use_device([facts], facts.torch_name)
            assert torch.zeros(1, device="cuda").device == torch.device(facts.torch_name)
    finally:
        torch.cuda.set_device(before)
