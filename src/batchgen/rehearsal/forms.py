"""Results without values: what a call of a hollow component returned, kept as forms and made again from them.

A form says how a tensor lies in which storage of the result, and which containers hold it; a record that keeps forms keeps no memory
alive. Knows nothing of calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True, slots=True)
class _Form:
    """A returned tensor without its values: which storage of the result it lies in, and how."""

    storage: int
    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Input:
    """A returned tensor that is one of the inputs itself, by its place among them."""

    place: int


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


@dataclass(frozen=True, slots=True)
class _Object:
    """A returned object that is no container (a cache, a distribution): its class, and its attributes' forms."""

    cls: type
    attributes: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Forms:
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


def remade(
    form: Any, *, inputs: Sequence[torch.Tensor] = (), reals: Sequence[torch.Tensor] | None = None, fake: FakeTensorMode | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """A result from its form, and the tensors that hold its new storages, in the form's order: zeros, or hollow ones of the fake mode.

    `inputs`: the tensors among the arguments, in their order. `reals`: the result's real tensors; None: copies of the recorded values
    stand for them, after the other new storages. No tracker sees what is made.
    """
    bases: dict[int, torch.Tensor] = {}
    with _disable_current_modes(), fake if fake is not None else nullcontext():
        for tensor in _forms_in(form):
            if tensor.storage not in bases:
                bases[tensor.storage] = torch.zeros(tensor.storage_bytes, dtype=torch.uint8)
        making = _Making(bases, inputs, reals)
        made = making.of(form)
    return made, [*bases.values(), *making.clones]
