"""The moving primitive: what is out raises, what comes in is what was there, each storage once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny
from batchgen.execute.memory import HostBudget, HostBuffer, LiveStorages
from batchgen.execute.moving import Absent, AbsentWeightError, Weights, is_opaque

CPU = torch.device("cpu")


def weights_of(module: nn.Module, name: str = "part", device: torch.device = CPU) -> Weights:
    return Weights.of(name, module, device)


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name, the non-persistent ones too."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def same_objects(module: nn.Module) -> set[frozenset[str]]:
    """Which names are one tensor object."""
    groups: dict[int, set[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


FORGOTTEN = {
    "linear with bias": (lambda: nn.Linear(4, 4), lambda: torch.randn(2, 4)),
    "linear without bias": (lambda: nn.Linear(4, 4, bias=False), lambda: torch.randn(2, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 1), lambda: torch.randn(1, 4, 3)),
    "conv2d": (lambda: nn.Conv2d(4, 4, 1), lambda: torch.randn(1, 4, 3, 3)),
    "conv2d without bias": (lambda: nn.Conv2d(4, 4, 1, bias=False), lambda: torch.randn(1, 4, 3, 3)),
    "conv3d without bias": (lambda: nn.Conv3d(4, 4, 1, bias=False), lambda: torch.randn(1, 4, 1, 3, 3)),
    "transposed conv": (lambda: nn.ConvTranspose2d(4, 4, 2), lambda: torch.randn(1, 4, 3, 3)),
    "embedding": (lambda: nn.Embedding(5, 4), lambda: torch.tensor([1])),
    "layer norm": (lambda: nn.LayerNorm(4), lambda: torch.randn(2, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), lambda: torch.randn(2, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda: torch.randn(2, 4, 3)),
}


class Matmul(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


FORGOTTEN["matmul"] = (Matmul, lambda: torch.randn(2, 4))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", FORGOTTEN)
def test_a_forgotten_module_raises(kind: str, mode: type[torch.no_grad]) -> None:
    build, make_input = FORGOTTEN[kind]
    module = build()
    weights = weights_of(module, "transformer")
    weights.out()
    with mode(), pytest.raises(AbsentWeightError, match=r"transformer\.\w+ is not on cpu"):
        module(make_input())
    weights.into()
    with mode():
        assert module(make_input()) is not None


def test_absent_weights_tell_shape_dtype_and_the_execution_device() -> None:
    module = nn.Linear(3, 5).to(torch.bfloat16)
    weights = weights_of(module, device=torch.device("cuda:0"))
    weights.out()
    weight = next(module.parameters())
    assert isinstance(weight, Absent)
    assert isinstance(weight, nn.Parameter)
    assert (tuple(weight.shape), weight.dtype, weight.device) == ((5, 3), torch.bfloat16, torch.device("cuda:0"))
    assert "part.weight" in repr(weight)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    pipe = request.param(tmp_path_factory.mktemp("model"))
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


@pytest.mark.parametrize("built", tiny.FAMILIES, indirect=True, ids=lambda family: family.__name__)
def test_ten_moves_change_nothing(built: dict[str, nn.Module]) -> None:
    for name, module in built.items():
        before, tied = snapshot(module), same_objects(module)
        weights = weights_of(module, name)
        for _ in range(10):
            weights.out()
            assert all(isinstance(parameter, Absent) for parameter in module.parameters())
            weights.into()
        after = snapshot(module)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(value, after[key]), f"{name}.{key}"
            assert value.stride() == after[key].stride(), f"{name}.{key}"
        assert same_objects(module) == tied
        assert weights.bytes_in == 10 * weights.moving_bytes + weights.staying_bytes
        weights.restore()


@pytest.mark.parametrize("built", [tiny.ltx, tiny.flux2_klein], indirect=True, ids=["ltx", "flux2_klein"])
def test_pitfall_24_buffers_read_outside_forward_stay(built: dict[str, nn.Module]) -> None:
    vae = built["vae"]
    weights_of(vae, "vae").out()
    buffers = dict(vae.named_buffers())
    assert buffers
    for name, buffer in buffers.items():
        assert not isinstance(buffer, Absent), name
        assert torch.isfinite(buffer.float()).all()


def test_pitfall_24_a_tied_weight_moves_once_and_stays_one_object() -> None:
    module = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    module["b"].weight = module["a"].weight
    weights = weights_of(module)
    weights.out()
    assert module["a"].weight is module["b"].weight
    assert weights.into() == 8 * 8 * 4
    assert module["a"].weight is module["b"].weight


def test_views_of_one_storage_move_once_and_still_share_it() -> None:
    base = torch.randn(4, 8)
    module = nn.Module()
    module.first, module.second = nn.Parameter(base[:2]), nn.Parameter(base.t())
    weights = weights_of(module)
    weights.out()
    assert weights.into() == base.nbytes
    assert torch.equal(module.first, base[:2])
    assert torch.equal(module.second, base.t())
    assert module.first.untyped_storage().data_ptr() == module.second.untyped_storage().data_ptr()


def test_only_the_bytes_that_are_looked_at_move() -> None:
    module = nn.Module()
    module.part = nn.Parameter(torch.randn(1000)[500:510])
    want = module.part.detach().clone()
    weights = weights_of(module)
    weights.out()
    assert weights.into() == 40
    assert torch.equal(module.part, want)


def test_a_copy_on_the_cpu_is_real() -> None:
    module = nn.Linear(4, 4)
    host = module.weight
    weights = weights_of(module)
    weights.into()
    assert module.weight.data_ptr() != host.data_ptr()
    with torch.no_grad():
        module.weight.zero_()
    weights.out()
    weights.into()
    assert torch.equal(module.weight, host), "nothing is copied back"


def test_moves_inside_inference_mode_give_ordinary_tensors() -> None:
    module = nn.Linear(4, 4)
    weights = weights_of(module)
    with torch.inference_mode():
        weights.out()
        weights.into()
    assert not module.weight.is_inference()


def test_out_of_memory_in_the_middle_leaves_nothing_in() -> None:
    module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    want = snapshot(module)
    weights = weights_of(module)
    weights.out()
    with LiveStorages("cpu", limit_bytes=10_000) as meter:
        with pytest.raises(torch.OutOfMemoryError):
            weights.into()
        assert meter.live == 0
    assert all(isinstance(parameter, Absent) for parameter in module.parameters())
    weights.into()
    assert all(torch.equal(value, want[key]) for key, value in snapshot(module).items())


def test_keeping_in_lets_the_host_go_and_can_be_undone() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    want = snapshot(module)
    weights = weights_of(module)
    weights.keep_in()
    assert all(torch.equal(value, want[key]) for key, value in snapshot(module).items())
    assert all(chunk.host is None for chunk in (*weights.staying, *weights.moving))
    weights.to_host()
    assert all(torch.equal(value, want[key]) for key, value in snapshot(module).items())


def test_pitfall_25_kept_weights_are_aligned_whatever_file_they_came_from() -> None:
    file = torch.randn(101)
    module = nn.Module()
    module.weight = nn.Parameter(file.view(-1)[1:])  # 4 bytes into a storage: as mapped weights mostly are
    weights_of(module).keep_in()
    assert module.weight.data_ptr() % 64 == 0
    assert torch.equal(module.weight, file[1:])


def test_a_held_copy_replaces_the_loaded_one() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3))
    want = snapshot(module)
    weights = weights_of(module)
    buffer = HostBuffer.of(weights.flat_bytes, pinned=False, budget=HostBudget(10**6))
    assert buffer is not None
    weights.hold(buffer.bytes, pinned=False)
    assert isinstance(next(module.parameters()), Absent)
    weights.into()
    assert all(torch.equal(value, want[key]) for key, value in snapshot(module).items())
    weights.restore()
    assert all(torch.equal(value, want[key]) for key, value in snapshot(module).items())


class Wrapped(torch.Tensor):
    """Stands for a quantised weight: a tensor subclass whose bytes are its own business."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.detach.default):
            return Wrapped(func(args[0].inner, **(kwargs or {})))
        args = tuple(arg.inner if isinstance(arg, Wrapped) else arg for arg in args)
        return func(*args, **(kwargs or {}))


def test_tensor_subclasses_move_by_their_own_means() -> None:
    module = nn.Linear(4, 4, bias=False)
    inner = module.weight.detach().clone()
    module.weight = nn.Parameter(Wrapped(inner), requires_grad=False)
    assert is_opaque(module.weight)
    weights = weights_of(module)
    weights.out()
    with torch.no_grad(), pytest.raises(AbsentWeightError):
        module(torch.randn(1, 4))
    weights.into()
    assert isinstance(module.weight, Wrapped)
    assert torch.equal(module.weight.inner, inner)


def test_weights_never_loaded_are_refused_by_name() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"vae\.weight is on the meta device"):
        weights_of(module, "vae")


def test_fake_weights_are_counted_and_a_device_mismatch_raises() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        module = nn.Linear(4, 4)
        here, there = torch.randn(2, 4, device="cuda:0"), torch.randn(2, 4)
    weights = weights_of(module, device=torch.device("cuda:0"))
    weights.out()
    with mode, torch.no_grad():
        with pytest.raises(AbsentWeightError):
            module(here)
        assert weights.into() == 80
        assert module(here).device == torch.device("cuda:0")
        with pytest.raises(RuntimeError, match="device"):
            module(there)
