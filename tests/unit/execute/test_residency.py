"""Placements carried out: in for a stage, out afterwards, one at a time, and never against what the user said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchgen.errors import UsageError
from batchgen.events import ComponentMoved, DecisionMade
from batchgen.execute.memory import HostBudget, LiveLimit, LiveStorages
from batchgen.execute.moving import Absent, AbsentWeightError
from batchgen.execute.residency import STRATEGIES, Residency
from batchgen.execute.streaming import NoStreams
from batchgen.plan.records import MODES

CPU = torch.device("cpu")
MIB = 2**20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Dit(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Vae(nn.Module):
    """Entered by `decode`, as VAEs are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.levels = nn.ModuleList(Block(width) for _ in range(2))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.levels[0](x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.levels[1](x)


def made(build: type[nn.Module], *args: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(*args).eval()


class Overlapping(NoStreams):
    """A device whose copies run beside compute, as far as the residency can tell."""

    overlaps = True


def residency_of(modes: dict[str, Any], events: list[Any] | None = None, **options: Any) -> Residency:
    emit = (events if events is not None else []).append
    return Residency(modes, CPU, **({"host_budget": HostBudget(2**30), "emit": emit} | options))


def absent(module: nn.Module) -> bool:
    return any(isinstance(parameter, Absent) for parameter in module.parameters())


def weight_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def test_every_placement_has_its_row() -> None:
    assert set(STRATEGIES) == set(MODES)


@pytest.mark.parametrize("keep", [0, 2000, 10**6], ids=["none kept", "some kept", "all kept"])
@pytest.mark.parametrize("mode", ["resident", "component-offload", "layerwise-offload"])
def test_results_do_not_depend_on_the_placement(mode: str, keep: int) -> None:
    module, x = made(Dit), torch.randn(3, 16)
    with torch.no_grad():
        want = module(x)
    residency = residency_of({"transformer": mode}, keep_bytes={"transformer": keep})
    residency.add("transformer", module)
    for _ in range(3):
        with torch.inference_mode(), residency.stage(["transformer"]):
            assert torch.equal(module(x), want)
            assert torch.equal(module(x), want)
    assert residency.remove("transformer") is module
    with torch.no_grad():
        assert torch.equal(module(x), want)


@pytest.mark.parametrize("mode", ["component-offload", "layerwise-offload"])
def test_offloaded_components_are_absent_between_stages(mode: str) -> None:
    module = made(Dit)
    residency = residency_of({"transformer": mode})
    residency.add("transformer", module)
    assert absent(module)
    with residency.stage(["transformer"]):
        module(torch.randn(1, 16))
    with pytest.raises(AbsentWeightError):
        module(torch.randn(1, 16))


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_lone_offloaded_dit_does_not_stay(prefetch: bool) -> None:
    """Between one window's denoise and the next's it is out, whatever was prefetched for other stages."""
    dit, encoder = made(Dit), made(Dit)
    residency = residency_of({"transformer": "component-offload", "text_encoder": "resident"}, fixed=["transformer"], streams=Overlapping())
    residency.add("transformer", dit)
    residency.add("text_encoder", encoder)
    with LiveLimit(CPU, 2**31):
        for _ in range(2):
            with residency.stage(["text_encoder"]):
                if prefetch:
                    residency.prefetch_next(["transformer"])
                assert residency.is_in("transformer") is prefetch
            with residency.stage(["transformer"]):
                assert not absent(dit)
                if prefetch:
                    residency.prefetch_next(["text_encoder"])
            assert absent(dit)


def test_a_prefetched_component_whose_stage_does_not_come_leaves_again() -> None:
    residency = residency_of({"vae": "component-offload", "text_encoder": "component-offload"}, streams=Overlapping())
    residency.add("vae", made(Vae))
    residency.add("text_encoder", made(Dit))
    with LiveLimit(CPU, 2**31):
        with residency.stage(["text_encoder"]):
            residency.prefetch_next(["vae"])
            assert residency.is_in("vae")
        with residency.stage(["text_encoder"]):
            assert not residency.is_in("vae")


def test_prefetch_leaves_the_room_that_the_stage_needs() -> None:
    residency = residency_of({"vae": "component-offload"}, streams=Overlapping())
    residency.add("vae", made(Vae))
    with LiveLimit(CPU, 300 * MIB) as limit:
        room = torch.empty(100 * MIB, dtype=torch.uint8)
        del room  # free now, but it was needed at the stage's peak
        assert limit.peak == 100 * MIB
        residency.prefetch_next(["vae"])
        assert not residency.is_in("vae")
        limit.reset_peak()
        residency.prefetch_next(["vae"])
        assert residency.is_in("vae")


def test_prefetch_does_nothing_where_copies_do_not_overlap() -> None:
    residency = residency_of({"vae": "component-offload"})
    residency.add("vae", made(Vae))
    with LiveLimit(CPU, 2**31):
        residency.prefetch_next(["vae"])
    assert not residency.is_in("vae")


def test_weights_are_never_copied_back_and_counted_where_copied() -> None:
    events: list[Any] = []
    module = made(Dit)
    residency = residency_of({"transformer": "component-offload"}, events)
    residency.add("transformer", module)
    for _ in range(3):
        with residency.stage(["transformer"]), residency.stage(["transformer"]):  # overlapping stages move nothing twice
            module(torch.randn(1, 16))
    moves = [event for event in events if isinstance(event, ComponentMoved)]
    size = weight_bytes(module)
    assert [(move.direction, move.bytes) for move in moves] == [("in", size), ("out", 0)] * 3
    assert residency.bytes_in == {"transformer": 3 * size}


@pytest.mark.parametrize("names", [("transformer", "transformer_2"), ("unet", "unet_2")])
def test_two_experts_are_never_in_together(names: tuple[str, str]) -> None:
    high, low, x = made(Dit, seed=1), made(Dit, seed=2), torch.randn(1, 16)
    with torch.no_grad():
        want = high(x), low(x)
    residency = residency_of(dict.fromkeys(names, "component-offload"))
    for name, module in zip(names, (high, low), strict=True):
        residency.add(name, module)
    seen = []
    for module, other in ((high, low), (low, high)):
        module.out.register_forward_pre_hook(lambda part, args, other=other: seen.append(absent(other)))
    with torch.no_grad():
        for _ in range(2):
            with residency.stage(names):
                for _ in range(2):
                    assert torch.equal(high(x), want[0])
                for _ in range(3):
                    assert torch.equal(low(x), want[1])
            assert absent(high)
            assert absent(low)
    assert seen == [True] * 10
    assert residency.bytes_in == dict.fromkeys(names, 2 * weight_bytes(high)), "one swap a stage"


def test_two_text_encoders_are_in_together() -> None:
    one, two = made(Dit), made(Dit)
    residency = residency_of({"text_encoder": "component-offload", "text_encoder_2": "component-offload"})
    residency.add("text_encoder", one)
    residency.add("text_encoder_2", two)
    with residency.stage(["text_encoder", "text_encoder_2"]):
        assert not absent(one)
        assert not absent(two)


def test_a_whole_pipeline_as_one_stage_holds_one_offloaded_component_at_a_time() -> None:
    parts: dict[str, Any] = {"text_encoder": made(Dit), "transformer": made(Dit), "vae": made(Vae)}
    residency = residency_of(dict.fromkeys(parts, "component-offload"))
    for name, part in parts.items():
        residency.add(name, part)
    x = torch.randn(1, 16)
    with torch.no_grad(), residency.stage(parts, one_at_a_time=True):
        for name, call in (("text_encoder", parts["text_encoder"]), ("transformer", parts["transformer"]), ("vae", parts["vae"].decode)):
            call(x)
            assert [other for other in parts if not absent(parts[other])] == [name]
    assert all(absent(part) for part in parts.values())


def test_an_autoencoder_asked_to_stream_is_offloaded_whole_and_says_so() -> None:
    events: list[Any] = []
    vae = made(Vae)
    residency = residency_of({"vae": "layerwise-offload"}, events)
    residency.add("vae", vae)
    assert residency.mode("vae") == "component-offload"
    (decision,) = (event for event in events if isinstance(event, DecisionMade))
    assert (decision.subject, decision.decision) == ("vae", "component-offload")
    with residency.stage(["vae"]):
        assert torch.isfinite(vae.decode(torch.zeros(1, 16))).all()


def test_sharding_is_refused_in_plain_words() -> None:
    residency = residency_of({"transformer": "fsdp"})
    with pytest.raises(UsageError, match="sharding needs a group of workers") as raised:
        residency.add("transformer", made(Dit))
    assert raised.value.option == "--fsdp"


def test_a_placement_is_applied_once() -> None:
    residency = residency_of({})
    residency.add("vae", made(Vae))
    with pytest.raises(ValueError, match="has a placement already"):
        residency.add("vae", made(Vae))


def test_removing_leaves_no_hook_behind() -> None:
    for mode in ("resident", "component-offload", "layerwise-offload"):
        module = made(Dit)
        residency = residency_of({"transformer": mode})
        residency.add("transformer", module)
        with residency.stage(["transformer"]):
            pass
        residency.remove("transformer")
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.modules())
        assert not absent(module)


def test_an_error_in_a_stage_takes_its_components_out() -> None:
    modules = {"transformer": made(Dit), "transformer_2": made(Dit), "text_encoder": made(Dit)}
    modes = {"transformer": "component-offload", "transformer_2": "component-offload", "text_encoder": "layerwise-offload"}
    residency = residency_of(modes)
    for name, module in modules.items():
        residency.add(name, module)
    with pytest.raises(RuntimeError), residency.stage(modules):
        modules["transformer"](torch.randn(1, 17))
    assert all(absent(module) for module in modules.values())
    assert not any(part._forward_pre_hooks for part in modules["transformer_2"].modules())


# -- the ladder -----------------------------------------------------------------------------------------------------

BOTH = {"transformer": "resident", "vae": "resident"}
STREAMS, OFFLOADED = ("transformer", "layerwise-offload"), ("vae", "component-offload")
LEANER: dict[str, tuple[dict[str, Any], tuple[str, ...], list[Any]]] = {
    "others first": (BOTH, (), [OFFLOADED, STREAMS, None]),
    "the stage's own streams at once": ({"transformer": "resident"}, (), [STREAMS, None]),
    "offloaded whole does not help its own stage": ({"transformer": "component-offload"}, (), [STREAMS, None]),
    "fewer kept blocks": ({"transformer": "layerwise-offload"}, (), [STREAMS, None]),
    "what the user placed stays": (BOTH, ("transformer", "vae"), [None]),
    "only what is free to go": (BOTH, ("transformer",), [OFFLOADED, None]),
}


@pytest.mark.parametrize("case", LEANER)
def test_the_next_leaner_placement(case: str) -> None:
    modes, fixed, steps = LEANER[case]
    modules = {"transformer": made(Dit), "vae": made(Vae)}
    x = torch.randn(1, 16)
    with torch.no_grad():
        want = modules["transformer"](x)
    residency = residency_of(modes, fixed=fixed, keep_bytes={"transformer": 10**6 if case == "fewer kept blocks" else 0})
    for name in modes:
        residency.add(name, modules[name])
    with torch.no_grad():
        for step in steps:
            with residency.stage(["transformer"]):
                assert torch.equal(modules["transformer"](x), want)
            assert residency.leaner(["transformer"]) == step
        with residency.stage(["transformer"]):
            assert torch.equal(modules["transformer"](x), want)
    if modes["transformer"] == "resident":
        residency.restore_planned()
        assert {name: residency.mode(name) for name in modes} == modes
        with torch.no_grad():
            assert torch.equal(modules["transformer"](x), want)


def test_a_leaner_placement_needs_less_of_the_device() -> None:
    module, x = made(Dit, 64), torch.randn(1, 64)
    peaks, left = [], []
    for mode in ("resident", "component-offload", "layerwise-offload"):
        with LiveStorages(CPU) as meter, torch.no_grad():
            residency = residency_of({"transformer": mode})
            residency.add("transformer", module)
            with residency.stage(["transformer"]):
                module(x)
            peaks.append(meter.peak)
            left.append(meter.live)
        residency.release()
    size = weight_bytes(module)
    assert peaks[0] == peaks[1] > size > peaks[2]
    assert left[0] >= size > left[2] > left[1]


def test_changing_a_placement_in_use_is_an_error() -> None:
    residency = residency_of({"vae": "resident"})
    residency.add("vae", made(Vae))
    with residency.stage(["vae"]):
        assert residency.leaner(["transformer"]) is None
    assert residency.leaner(["transformer"]) == ("vae", "component-offload")


def test_what_does_not_fit_when_loaded_goes_to_the_leaner_placement() -> None:
    events: list[Any] = []
    residency = residency_of({"text_encoder": "resident", "vae": "resident"}, events, fixed=["vae"])
    unaligned = made(Dit, 64)
    for parameter in unaligned.parameters():
        parameter.data = torch.cat([torch.zeros(1), parameter.data.flatten()])[1:].view_as(parameter)
    with LiveLimit(CPU, 10_000):
        residency.add("text_encoder", unaligned)
        assert residency.mode("text_encoder") == "component-offload"
        residency.remove("text_encoder")
        with pytest.raises(torch.OutOfMemoryError):
            residency.add("vae", unaligned)
    assert not absent(unaligned)
    assert any(isinstance(event, DecisionMade) and event.decision == "component-offload" for event in events)
