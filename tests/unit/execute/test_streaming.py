"""Layerwise offload: right results, exact bytes, bounded memory, and an order of copies and compute that never races."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from batchgen.execute.memory import HostBudget, HostBuffer, LiveStorages
from batchgen.execute.moving import Absent, AbsentWeightError, Weights, aligned
from batchgen.execute.streaming import BlockStream, NoStreams, find_blocks, split_chunks
from batchgen.plan.traffic import kept_blocks, layerwise_bytes

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int = 8, extra: bool = False) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(width, width), nn.RMSNorm(width)
        self.extra = nn.Linear(width, width) if extra else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.proj(x)) + (self.extra(x) if self.extra is not None else 0)


class Model(nn.Module):
    """Two lists called one after the other, the second registered first, a third never called."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.single = nn.ModuleList(Block() for _ in range(2))
        self.joint = nn.ModuleList(Block(extra=index == 0) for index in range(blocks))
        self.visual = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in (*self.joint, *self.single):
            x = block(x)
        return x


def made(build: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return build(*args, **kwargs).eval()


def stream_of(module: nn.Module, device: torch.device = CPU, **options: Any) -> BlockStream:
    return BlockStream("part", module, device, **({"depth": 2, "streams": NoStreams()} | options))


def sizes_in_order(module: Model) -> list[int]:
    return [sum(parameter.nbytes for parameter in block.parameters()) for block in (*module.joint, *module.single)]


def held(size_bytes: int) -> HostBuffer | None:
    return HostBuffer.of(size_bytes, pinned=False, budget=HostBudget(2**30))


@pytest.mark.parametrize("hold", [held, lambda size: None], ids=["flat host copy", "loaded tensors"])
@pytest.mark.parametrize("keep", [0, 700, 10**6], ids=["none kept", "some kept", "all kept"])
@pytest.mark.parametrize("depth", [2, 3, 4, 8])
def test_same_bits_and_exact_bytes(depth: int, keep: int, hold: Any) -> None:
    module, x = made(Model), torch.randn(2, 8)
    with torch.no_grad():
        want = module(x)
    sizes = sizes_in_order(module)
    stream = stream_of(module, depth=depth, keep_bytes=keep, hold=hold)
    before = stream.outside.bytes_in
    for forwards in (3, 2):
        stream.open()
        with torch.inference_mode():
            for _ in range(forwards):
                assert torch.equal(module(x), want)
        stream.close()
    kept = kept_blocks(sizes, keep)
    assert stream.kept_blocks == kept
    assert stream.bytes_in == layerwise_bytes(before, sizes, kept=kept, depth=depth, visits=(3, 2))
    stream.release()
    with torch.no_grad():
        assert torch.equal(module(x), want)
    assert not any(isinstance(parameter, Absent) for parameter in module.parameters())


def test_blocks_never_called_never_move() -> None:
    module = made(Model)
    stream = stream_of(module, keep_bytes=10**6)
    stream.open()
    with torch.no_grad():
        module(torch.randn(1, 8))
    stream.close()
    assert all(isinstance(parameter, Absent) for parameter in module.visual.parameters())
    assert stream.kept_bytes == sum(sizes_in_order(module))


def test_used_while_closed_raises() -> None:
    module = made(Model)
    stream = stream_of(module)
    with torch.no_grad(), pytest.raises(AbsentWeightError, match=r"part\.joint\.0\."):
        module(torch.randn(1, 8))
    stream.open()
    with torch.no_grad():
        module(torch.randn(1, 8))
    stream.close()
    with torch.no_grad(), pytest.raises(AbsentWeightError):
        module(torch.randn(1, 8))


def test_streamed_weights_are_absent_outside_their_own_call() -> None:
    module = made(Model)
    stream = stream_of(module)
    stream.open()
    with torch.no_grad():
        module(torch.randn(1, 8))
        with pytest.raises(AbsentWeightError):
            module.joint[1].proj.weight + 0


class ThirdFails(Block):
    fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("no room")
        return super().forward(x)


@pytest.mark.parametrize("keep", [0, 700])
def test_an_error_inside_a_block_leaves_nothing_behind(keep: int) -> None:
    module = made(Model)
    with torch.no_grad():
        want = module(torch.ones(1, 8))
    bad = ThirdFails()
    bad.load_state_dict(module.joint[2].state_dict())
    for index in range(len(module.joint)):  # blocks of one list are of one class
        block = bad if index == 2 else ThirdFails(extra=index == 0)
        block.load_state_dict(module.joint[index].state_dict())
        block.fails = index == 2
        module.joint[index] = block
    stream = stream_of(module, keep_bytes=keep)
    for _ in range(2):
        stream.open()
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            module(torch.ones(1, 8))
        stream.close()
    assert isinstance(module.joint[2].proj.weight, Absent)
    bad.fails = False
    stream.open()
    with torch.no_grad():
        assert torch.equal(module(torch.ones(1, 8)), want)
        assert torch.equal(module(torch.ones(1, 8)), want)


def test_a_block_left_out_in_later_passes_does_not_disturb_the_others() -> None:
    module, x = made(Model), torch.ones(1, 8)

    def skipping(x: torch.Tensor, skip: int | None) -> torch.Tensor:
        x = module.head(x)
        for index, block in enumerate((*module.joint, *module.single)):
            x = x if index == skip else block(x)
        return x

    with torch.no_grad():
        want = [skipping(x, skip) for skip in (None, 1, 3, None)]
        stream = stream_of(module, depth=3)
        stream.open()
        got = [skipping(x, skip) for skip in (None, 1, 3, None)]
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))


def test_weights_shared_with_anything_outside_the_block_stay_in() -> None:
    module = made(Model)
    module.joint[1].proj.weight = module.joint[0].proj.weight
    module.joint[2].proj.weight = module.head.weight
    outside, blocks = split_chunks("part", module)
    names = {piece.name for chunk in outside for piece in chunk.pieces}
    assert {"part.head.weight", "part.joint.0.proj.weight"} <= names
    streamed = {piece.name for _, _, chunks in blocks for chunk in chunks for piece in chunk.pieces}
    assert not names & streamed
    stream = stream_of(module)
    stream.open()
    with torch.no_grad():
        module(torch.ones(1, 8))
    assert module.joint[1].proj.weight is module.joint[0].proj.weight


def test_quantised_weights_are_never_streamed() -> None:
    class Quantised(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    module = made(Model)
    module.joint[0].proj.weight = nn.Parameter(module.joint[0].proj.weight.detach().as_subclass(Quantised), requires_grad=False)
    outside, _ = split_chunks("part", module)
    assert "part.joint.0.proj.weight" in {piece.name for chunk in outside for piece in chunk.pieces}


# -- which blocks ---------------------------------------------------------------------------------------------------


def lists_of(module: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for path, _ in find_blocks(module):
        name = path.rpartition(".")[0]
        found[name] = found.get(name, 0) + 1
    return found


BLOCKS = {
    "Qwen-Image": (tiny.qwen_transformer, {"transformer_blocks": 2}),
    "Wan": (tiny.wan_transformer, {"blocks": 2}),
    "T5": (lambda: tiny.t5_text(100), {"encoder.block": 2}),
    "CLIP": (lambda: tiny.clip_text(tiny.clip_tokenizer()), {"text_model.encoder.layers": 3}),
    "Qwen2.5-VL": (
        lambda: tiny.made(tiny.tr.Qwen2_5_VLForConditionalGeneration, tiny.qwen_vl_config(tiny.qwen_tokenizer())),
        {"model.visual.blocks": 2, "model.language_model.layers": 3},
    ),
    "Qwen-Image VAE": (tiny.qwen_vae, {}),
    "AutoencoderKL": (tiny.image_vae, {}),
    "FLUX.1": (
        lambda: diffusers.FluxTransformer2DModel(
            num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            pooled_projection_dim=32, in_channels=16, axes_dims_rope=(4, 4, 8)),
        {"transformer_blocks": 2, "single_transformer_blocks": 3},
    ),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_repeated_blocks_found(kind: str) -> None:
    build, want = BLOCKS[kind]
    found = lists_of(build())
    assert {name.removeprefix("text_model.") if kind == "CLIP" else name: count for name, count in found.items()} == {
        name.removeprefix("text_model.") if kind == "CLIP" else name: count for name, count in want.items()
    }


def test_a_module_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no repeated blocks"):
        stream_of(nn.Linear(2, 2))


# -- order of copies and compute ------------------------------------------------------------------------------------


class CopiesSeen(TorchDispatchMode):
    def __init__(self, owner: RecordingStreams) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.owner.copy(args[0].untyped_storage().data_ptr(), lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


class RecordingStreams:
    """Two streams on paper. Copies really happen as late as the events allow: when the compute stream waits for them.

    `copies` and `computes` count operations issued; an event is such a count. A copy into a buffer whose last reader is not
    before an event that the copy stream has waited for, or a read of a buffer whose copy the compute stream has not waited
    for, is a race.
    """

    overlaps = True

    def __init__(self) -> None:
        self.copies = self.computes = 0
        self.copy_knows = 0  # computes that the copy stream has waited for
        self.compute_knows = 0  # copies that the compute stream has waited for
        self.last_read: dict[int, int] = {}  # buffer -> compute operation
        self.last_copy: dict[int, int] = {}  # buffer -> copy operation
        self.races: list[str] = []
        self.ahead = 0  # the most copies that were under way while a block computed
        self._late: list[Any] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        with CopiesSeen(self):
            yield

    def copy(self, buffer: int, run: Any) -> None:
        self.copies += 1
        if self.last_read.get(buffer, 0) > self.copy_knows:
            self.races.append(f"copy {self.copies} overwrites a buffer before compute {self.last_read[buffer]} has ended")
        self.last_copy[buffer] = self.copies
        self._late.append((self.copies, run))

    def read(self, buffer: int) -> None:
        self.computes += 1
        if self.last_copy.get(buffer, 0) > self.compute_knows:
            self.races.append(f"compute {self.computes} reads a buffer before copy {self.last_copy[buffer]} has ended")
        self.last_read[buffer] = self.computes
        self.ahead = max(self.ahead, len(self._late))

    def record_copy(self) -> int:
        return self.copies

    def record_compute(self) -> int:
        return self.computes

    def copy_waits(self, event: int) -> None:
        self.copy_knows = max(self.copy_knows, event)

    def compute_waits(self, event: int) -> None:
        self.compute_knows = max(self.compute_knows, event)
        while self._late and self._late[0][0] <= event:
            self._late.pop(0)[1]()


@pytest.mark.parametrize("keep", [0, 700], ids=["none kept", "some kept"])
@pytest.mark.parametrize("blocks", [2, 3, 5, 9])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_no_buffer_is_overwritten_before_its_compute_event(depth: int, blocks: int, keep: int) -> None:
    module, x, streams = made(Model, blocks), torch.randn(2, 8), RecordingStreams()
    with torch.no_grad():
        want = module(x)
    stream = stream_of(module, depth=depth, keep_bytes=keep, hold=held, streams=streams)
    for block in (*module.joint, *module.single):
        block.proj.register_forward_pre_hook(lambda part, args: streams.read(part.weight.untyped_storage().data_ptr()))
    for _ in range(2):
        stream.open()
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(module(x), want)
        stream.close()
    assert streams.races == []
    assert streams.ahead >= min(depth, blocks + 2 - stream.kept_blocks) - 1, "copies run ahead of compute"


def test_the_check_itself_sees_races() -> None:
    streams = RecordingStreams()
    with streams.copying():
        torch.zeros(4).copy_(torch.ones(4))
    (buffer,) = streams.last_copy
    streams.read(buffer)
    streams.copy(buffer, lambda: None)
    assert len(streams.races) == 2


# -- fake devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_blocks", [0, 1, 4])
def test_bytes_on_a_fake_device_are_bounded_and_counted_exactly(keep_blocks: int) -> None:
    device, mode = torch.device("cuda:0"), FakeTensorMode(allow_non_fake_inputs=True)

    def run(streamed: bool) -> tuple[int, int, Any]:
        with mode:
            module, x = Model(16), torch.randn(64, 8, device=device)
        sizes = sizes_in_order(module)
        with mode, torch.no_grad(), LiveStorages(device) as meter:
            if streamed:
                stream = stream_of(module, device, keep_bytes=sum(sizes[:keep_blocks]))
                for _ in range(2):
                    stream.open()
                    for _ in range(3):
                        module(x)
                    stream.close()
                return meter.peak, meter.live, stream
            weights = Weights.of("part", module, device)
            weights.keep_in()
            resident = meter.live
            module(x)
            return meter.peak - resident, resident, sizes

    activations, resident, sizes = run(False)
    peak, left, stream = run(True)
    kept = [chunk for block in stream.blocks if block.kept is not None for chunk in block.chunks]
    weights = sum(aligned(chunk.size_bytes) for chunk in (*stream.outside.moving, *stream.outside.staying, *kept))
    assert left == weights
    assert peak <= weights + stream.buffer_bytes + activations
    if keep_blocks < 4:
        assert peak < resident + activations, "streaming needs less than resident"
    assert stream.kept_blocks == keep_blocks
    assert stream.bytes_in == layerwise_bytes(stream.outside.bytes_in, sizes, kept=keep_blocks, depth=2, visits=(3, 3))
