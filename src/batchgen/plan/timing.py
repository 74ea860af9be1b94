"""How long a stage takes: compute and copies from the device's rates, times an efficiency. Pure numbers.

Seconds = max(compute, copies) where a stream runs beside compute, else their sum. The efficiency is the share of the catalogue's
dense rate that real kernels reach: a stated default until runs on this machine have taught a better one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchgen.inventory.records import DeviceRates
from batchgen.plan.batching import Layout, StageModel

# Shares of the dense bf16 rate. Large matrix products reach more than the convolutions of a VAE; measured runs replace these.
DEFAULT_EFFICIENCY: Mapping[str, float] = {"denoise": 0.45, "decode": 0.25, "pipeline": 0.4}
DEFAULT_ENCODE_EFFICIENCY = 0.35
LINK_EFFICIENCY = 0.8  # of the host link, with pinned memory
CALL_SECONDS = 0.004  # launches and Python around one call of a component


@dataclass(frozen=True, slots=True)
class Speeds:
    """Rates of the device, and the efficiency by stage that runs on this machine have shown."""

    rates: DeviceRates
    learned: Mapping[str, float]

    def efficiency(self, stage: str) -> float:
        return self.learned.get(stage, DEFAULT_EFFICIENCY.get(stage, DEFAULT_ENCODE_EFFICIENCY))

    def compute_seconds(self, stage: StageModel, batch: int) -> float:
        """One batch, its weights on the device."""
        flops = stage.flops.at(batch) / (self.rates.dense_bf16_flops * self.efficiency(stage.name))
        return flops + CALL_SECONDS * sum(stage.calls.values())

    def copy_seconds(self, size_bytes: int) -> float:
        return size_bytes / (self.rates.host_link_bytes * LINK_EFFICIENCY)

    def exchange_seconds(self, size_bytes: int) -> float:
        """Between devices: over their own link where they have one, else over the host's."""
        return size_bytes / ((self.rates.device_link_bytes or self.rates.host_link_bytes) * LINK_EFFICIENCY)

    def batch_seconds(self, layout: Layout, stage: StageModel, batch: int) -> float:
        """One batch of an open stage, streams and what sharded blocks are gathered from beside compute."""
        sharded = any(layout.mode(name) == "fsdp" for name in stage.components)
        compute = self.compute_seconds(stage, batch) / (layout.branches if sharded else 1)
        return max(compute, self.copy_seconds(layout.streamed(stage, 1)), self.exchange_seconds(layout.gathered(stage, 1)))


def balancing_batch(speeds: Speeds, layout: Layout, stage: StageModel, largest: int) -> int:
    """The smallest batch whose compute covers the copies of its stream; the largest one where none does."""
    copies = speeds.copy_seconds(layout.streamed(stage, 1))
    for batch in range(1, largest + 1):
        if speeds.compute_seconds(stage, batch) >= copies:
            return batch
    return largest
