"""Hollow components: the real class built from its real config, with shapes and dtypes but no storage.

A hollow component is called like a real one. Inside, its own forward runs over fake tensors; what it returns are real zeros of
the right shapes, strides and shared storages, so that any pipeline code around it goes on as usual. A call that was played before
with the same inputs is not played again: its peak and FLOPs are added from the record.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers.initialization import no_init_weights

from batchgen.rehearsal.live import LiveBytes, held_tensors, tensors_in

# How pipelines enter a component. VAEs are entered by encode and decode, the others by forward.
ENTRIES = ("forward", "encode", "decode", "get_image_features", "get_text_features")
_HASHED_ELEMENTS = 2**20  # integer and bool inputs up to this size are told apart by their values


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a hollow component as it was played."""

    peak_bytes: int  # above what was live when it began
    flops: int
    retained_bytes: int  # left live besides what it returned: caches
    result: Any  # the result's form: tensors as _Form


@dataclass(slots=True)
class Rehearsed:
    """All calls of one component: how often each entry was called, and the calls on record by their inputs."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    records: dict[Any, list[Call]] = field(default_factory=dict)
    played: int = 0


@dataclass(frozen=True, slots=True)
class _Form:
    """A returned tensor without its values: which storage of the result it lies in, and how."""

    storage: int
    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Stage:
    """Where hollow calls report: one fake mode for all components, and the tracker at work."""

    def __init__(self) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracker: LiveBytes | None = None
        self.components: dict[str, Rehearsed] = {}
        self.order: list[str] = []  # components as they were called; calls in a row once

    @contextmanager
    def following(self, tracker: LiveBytes) -> Iterator[LiveBytes]:
        """Calls within are followed by the tracker.

        Garbage in cycles (outputs that know their caches) goes at the start of every component's call, never at a time that
        hangs on what else the process did.
        """
        before, self.tracker = self.tracker, tracker
        with small_collections():
            gc.disable()
            try:
                with torch.no_grad(), tracker:
                    yield tracker
            finally:
                gc.enable()
                self.tracker = before

    def called(self, name: str, entry: str) -> None:
        """Counts a call from outside."""
        counts = self.components[name].counts
        counts[entry] = counts.get(entry, 0) + 1
        if self.order[-1:] != [name]:
            self.order.append(name)

    def forget_calls(self) -> None:
        """Counts begin anew; what was played stays on record."""
        self.order.clear()
        for rehearsed in self.components.values():
            rehearsed.counts.clear()


@contextmanager
def small_collections() -> Iterator[None]:
    """What is there already is not looked through by collections inside, so that one before every call costs little.

    May be nested: then only the outermost gives back what it froze, for giving back and freezing again looks through everything.
    """
    nested = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not nested:
            gc.unfreeze()


def build(
    cls: Any, config: Mapping[str, Any] | Any, dtype: torch.dtype, stage: Stage, *, library: str,
) -> nn.Module:
    """A hollow module of the class, as its loader would leave it: weights in `dtype`, fp32 where the class keeps it, tables tied."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with stage.fake, no_init_weights():
            module: nn.Module = cls.from_config(config) if library != "transformers" else cls(config)
    finally:
        torch.set_default_dtype(before)
    module.eval().requires_grad_(False)
    _cast_as_loaded(module, dtype, stage.fake)
    tie: Any = getattr(module, "tie_weights", None)
    if library == "transformers" and tie is not None:
        with stage.fake:
            tie()
    return module


def _cast_as_loaded(module: nn.Module, dtype: torch.dtype, fake: FakeTensorMode) -> None:
    """Loaders cast every floating weight of the file to the dtype asked for, but for the modules a class keeps in fp32."""
    plan = getattr(module, "_get_dtype_plan", None)
    if plan is not None:  # transformers: names or patterns -> dtype
        kept = tuple(plan(dtype))
    else:
        kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    persistent = set(module.state_dict())
    done: dict[int, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for leaf, tensor in table.items():
                name = f"{prefix}.{leaf}" if prefix else leaf
                if tensor is None or not tensor.dtype.is_floating_point or name not in persistent:
                    continue
                wanted = torch.float32 if any(word in name.split(".") for word in kept) else dtype
                if tensor.dtype != wanted:
                    table[leaf] = done.setdefault(id(tensor), _recast(tensor, wanted, fake))


def _recast(tensor: torch.Tensor, dtype: torch.dtype, fake: FakeTensorMode) -> torch.Tensor:
    with fake:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage once."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in (*module.parameters(), *module.buffers())}
    return sum(sizes.values())


def parameter_count(module: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def enter(module: nn.Module, name: str, stage: Stage, *, repeats: bool = False) -> nn.Module:
    """Wraps the ways into a hollow component. Signatures are kept: stages drop arguments that they do not see in them.

    `repeats`: of equal blocks called with equal inputs one is played for all (sixty of a transformer's cost what one costs).
    """
    if repeats:
        _share_blocks(module, stage)
    rehearsed = stage.components.setdefault(name, Rehearsed(name))
    for entry in ENTRIES:
        inner = getattr(module, entry, None)
        if callable(inner):
            setattr(module, entry, _wrapped(inner, entry, module, rehearsed, stage))
    setattr(module, "to", _moved_to(module, stage))  # noqa: B010  torch's own cannot swap hollow weights
    return module


def _moved_to(module: nn.Module, stage: Stage) -> Callable[..., nn.Module]:
    """`module.to`, which some pipelines call for another dtype (a VAE in float32). Devices are not its business here."""

    def to(*args: Any, **kwargs: Any) -> nn.Module:
        dtype: torch.dtype | None = torch._C._nn._parse_to(*args, **kwargs)[1]
        done: dict[int, torch.Tensor] = {}
        for part in module.modules() if dtype is not None else ():
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for table in tables:
                for leaf, tensor in table.items():
                    if tensor is not None and tensor.dtype.is_floating_point and tensor.dtype != dtype:
                        assert dtype is not None
                        made = done.get(id(tensor))
                        table[leaf] = done[id(tensor)] = made if made is not None else _recast(tensor, dtype, stage.fake)
        return module

    return to


def count_calls(module: nn.Module, name: str, stage: Stage) -> nn.Module:
    """The same count of calls over a real component, for holding one run against the other."""
    rehearsed = stage.components.setdefault(name, Rehearsed(name))
    for entry in ENTRIES:
        inner = getattr(module, entry, None)
        if callable(inner):
            setattr(module, entry, _counted(inner, entry, rehearsed.name, stage))
    return module


def _counted(inner: Callable[..., Any], entry: str, name: str, stage: Stage) -> Callable[..., Any]:
    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        stage.called(name, entry)
        return inner(*args, **kwargs)

    return counted


def _wrapped(inner: Callable[..., Any], entry: str, module: nn.Module, rehearsed: Rehearsed, stage: Stage) -> Callable[..., Any]:
    @functools.wraps(inner)
    def hollow_call(*args: Any, **kwargs: Any) -> Any:
        tracker = stage.tracker
        if tracker is None or tracker.hollow_depth:  # called from within: part of the outer call
            return inner(*args, **kwargs)
        gc.collect()
        stage.called(rehearsed.name, entry)
        key = (entry, _signature((args, kwargs)))
        records = rehearsed.records.setdefault(key, [])
        # A first call may fill caches that later ones find (rope tables): only a call that left nothing behind stands for the next.
        if records and (records[-1].retained_bytes == 0 or len(records) > 1):
            return _replay(records[-1], tracker)
        call, result = _play(inner, args, kwargs, module, tracker, stage)
        rehearsed.played += 1
        records.append(call)
        return result

    return hollow_call


def _play(
    inner: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module, tracker: LiveBytes, stage: Stage,
) -> tuple[Call, Any]:
    for tensor in held_tensors(module):
        tracker.ignore_weight(tensor)
    live, flops, peak = tracker.live, tracker.flops, tracker.peak
    tracker.peak = live
    tracker.hollow_depth += 1
    try:
        with _WritesOfNumbers():
            result = inner(*args, **kwargs)
    finally:
        tracker.hollow_depth -= 1
    above = tracker.peak - live
    tracker.peak = max(peak, tracker.peak)
    forms = _Forms()
    form = forms.of(result)
    returned = sum(tracker.size_of(storage) for storage in forms.storages)
    retained = tracker.live - live - returned
    bases = {}
    with _disable_current_modes():
        for index, storage in enumerate(forms.storages):
            bases[index] = torch.zeros(storage.nbytes(), dtype=torch.uint8)
    for index, storage in enumerate(forms.storages):
        tracker.stand_in(storage, bases[index])
    with _disable_current_modes():
        made = _Making(bases, reals=forms.reals).of(form)
    return Call(above, tracker.flops - flops, retained, form), made


class _WritesOfNumbers(TorchFunctionMode):
    """`hollow[places] = number` makes nothing and is left out.

    Masks are written row by row, tens of thousands of times for a clip (HunyuanVideo 1.5's VAE), and every such write would be a
    view and a fill of a hollow tensor. Writes to real tensors, of tensors, or to places that tensors name, are carried out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = func is torch.Tensor.__setitem__ and isinstance(args[0], FakeTensor) and isinstance(args[2], int | float)
        if writes and _named_plainly(args[1]):
            return None
        return func(*args, **(kwargs or {}))


def _named_plainly(places: Any) -> bool:
    if isinstance(places, tuple):
        return all(map(_named_plainly, places))
    if isinstance(places, slice):
        return all(end is None or isinstance(end, int) for end in (places.start, places.stop, places.step))
    return places is None or places is Ellipsis or isinstance(places, int)


def _replay(call: Call, tracker: LiveBytes) -> Any:
    tracker.spike(call.peak_bytes, call.flops)
    bases: dict[int, torch.Tensor] = {}
    with _disable_current_modes():
        for form in _forms_in(call.result):
            if form.storage not in bases:
                bases[form.storage] = torch.zeros(form.storage_bytes, dtype=torch.uint8)
        making = _Making(bases)
        made = making.of(call.result)
    for base in (*bases.values(), *making.clones):
        tracker._see(base)
    return made


# -- repeated blocks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Input:
    """A returned tensor that is one of the inputs itself, by its place among them."""

    place: int


def _share_blocks(module: nn.Module, stage: Stage) -> None:
    inside: set[int] = set()
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) > 2 and id(part) not in inside:
            for nested in part.modules():
                inside.add(id(nested))
            records: dict[Any, Call | None] = {}
            for block in part:
                block.forward = _shared(block.forward, _block_key(block), records, stage)


def _block_key(block: nn.Module) -> Any:
    """What makes two blocks behave alike: class, plain attributes, and the shapes and dtypes of the weights."""
    plain = tuple(sorted((key, repr(value)) for key, value in vars(block).items() if isinstance(value, str | int | float | bool)))
    weights = tuple((key, tuple(value.shape), value.dtype) for key, value in block.named_parameters())
    return type(block), plain, weights


def _shared(inner: Callable[..., Any], block: Any, records: dict[Any, Call | None], stage: Stage) -> Callable[..., Any]:
    @functools.wraps(inner)
    def shared(*args: Any, **kwargs: Any) -> Any:
        tracker = stage.tracker
        if tracker is None:
            return inner(*args, **kwargs)
        key = (block, _signature((args, kwargs)))
        call = records.get(key)
        if call is not None:
            return _replay_block(call, args, kwargs, tracker, stage)
        live, flops, peak = tracker.live, tracker.flops, tracker.peak
        tracker.peak = live
        result = inner(*args, **kwargs)
        above = tracker.peak - live
        tracker.peak = max(peak, tracker.peak)
        if key not in records and (block, _signature((args, kwargs))) != key:
            records[key] = None  # it wrote into its arguments (a cache of frames), which a record would not
        elif key not in records:
            records[key] = _block_call(result, (args, kwargs), above, tracker.flops - flops, tracker.live - live, tracker)
        return result

    return shared


def _block_call(result: Any, inputs: Any, above: int, flops: int, left: int, tracker: LiveBytes) -> Call | None:
    """The record of a block's call; None where another call could differ: it left a cache, or gave views of its inputs."""
    given = list(tensors_in(inputs))
    places = {id(tensor): place for place, tensor in enumerate(given)}
    forms = _Forms(places)
    form = forms.of(result)
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    if any(storage._cdata in storages for storage in forms.storages) or forms.reals:
        return None
    if left != sum(tracker.size_of(storage) for storage in forms.storages):
        return None
    return Call(above, flops, 0, form)


def _replay_block(call: Call, args: Any, kwargs: Any, tracker: LiveBytes, stage: Stage) -> Any:
    tracker.spike(call.peak_bytes, call.flops)
    bases: dict[int, torch.Tensor] = {}
    with _disable_current_modes(), stage.fake:
        for form in _forms_in(call.result):
            if form.storage not in bases:
                bases[form.storage] = torch.empty(form.storage_bytes, dtype=torch.uint8)
        made = _Making(bases, list(tensors_in((args, kwargs)))).of(call.result)
    for base in bases.values():
        tracker._see(base)
    return made


# -- results without values ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Object:
    """A returned object that is no container (a cache, a distribution): its class, and its attributes' forms."""

    cls: type
    attributes: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class _Forms:
    """Turns a result into its form; keeps the hollow storages it met, in order.

    `places`: inputs by identity, to be found again in the result. `reals`: the result's real tensors that are none of them.
    """

    places: Mapping[int, int] = field(default_factory=dict)
    reals: list[torch.Tensor] = field(default_factory=list)
    storages: list[Any] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)

    def of(self, value: Any, depth: int = 6) -> Any:
        if id(value) in self.places:
            return _Input(self.places[id(value)])
        if isinstance(value, FakeTensor):
            storage = value.untyped_storage()
            number = self.numbers.setdefault(storage._cdata, len(self.storages))
            if number == len(self.storages):
                self.storages.append(storage)
            return _Form(number, storage.nbytes(), value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()))
        if isinstance(value, torch.Tensor):
            self.reals.append(value)
            with _disable_current_modes():  # the record must not keep the result's own memory alive
                return _Real(len(self.reals) - 1, value.detach().clone())
        if value is None or isinstance(value, str | int | float | bool):
            return value
        if isinstance(value, dict):
            return _Mapping(type(value), tuple((key, self.of(item, depth)) for key, item in value.items()))
        if isinstance(value, list | tuple):
            return _Sequence(type(value), tuple(self.of(item, depth) for item in value), named=hasattr(value, "_fields"))
        if depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
            found = _Object(type(value), tuple((name, self.of(item, depth - 1)) for name, item in vars(value).items()))
            if next(_forms_in(found), None) is not None:
                return found
        return value


@dataclass(frozen=True, slots=True)
class _Real:
    """A returned tensor that is real: its number among them, and its values."""

    number: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Mapping:
    cls: type
    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class _Sequence:
    cls: type
    items: tuple[Any, ...]
    named: bool = False


def _forms_in(form: Any) -> Iterator[_Form]:
    if isinstance(form, _Form):
        yield form
    elif isinstance(form, _Mapping):
        for _, item in form.items:
            yield from _forms_in(item)
    elif isinstance(form, _Sequence):
        for item in form.items:
            yield from _forms_in(item)
    elif isinstance(form, _Object):
        for _, item in form.attributes:
            yield from _forms_in(item)


@dataclass(slots=True)
class _Making:
    """Makes a result again: its hollow tensors laid over the given storages, its real ones those given or copies of the recorded values.

    No closures: one that calls itself would keep the storages alive until the next garbage collection.
    """

    bases: Mapping[int, torch.Tensor]
    inputs: Sequence[torch.Tensor] = ()
    reals: Sequence[torch.Tensor] | None = None
    clones: list[torch.Tensor] = field(default_factory=list)

    def of(self, form: Any) -> Any:
        if isinstance(form, _Input):
            return self.inputs[form.place]
        if isinstance(form, _Form):
            return self.bases[form.storage].view(form.dtype).as_strided(form.shape, form.stride, form.offset)
        if isinstance(form, _Real):
            if self.reals is not None:
                return self.reals[form.number]
            self.clones.append(form.values.clone())
            return self.clones[-1]
        if isinstance(form, _Mapping):
            items = {key: self.of(value) for key, value in form.items}
            return items if form.cls is dict else form.cls(**items)
        if isinstance(form, _Sequence):
            elements = [self.of(value) for value in form.items]
            return form.cls(*elements) if form.named else form.cls(elements)
        if isinstance(form, _Object):
            made: Any = object.__new__(form.cls)
            vars(made).update({name: self.of(value) for name, value in form.attributes})
            return made
        return form


def _signature(value: Any) -> Any:
    """What decides a call's shapes: shapes, dtypes and strides of tensors, values of small whole-number ones, plain arguments."""
    if isinstance(value, torch.Tensor):
        values: Any = None
        if not value.dtype.is_floating_point and not isinstance(value, FakeTensor) and value.numel() <= _HASHED_ELEMENTS:
            with _disable_current_modes():
                values = hash(value.contiguous().numpy().tobytes())
        return "tensor", tuple(value.shape), value.stride(), value.dtype, isinstance(value, FakeTensor), values
    if isinstance(value, dict):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if value is None or isinstance(value, str | int | float | bool | torch.dtype | torch.device):
        return value
    return type(value).__name__
