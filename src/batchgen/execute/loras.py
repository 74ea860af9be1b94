"""LoRA adapters: read once, attached to a component as it is loaded, before its placement is applied, and switched between batches.

An adapter's weights become weights of the component's own blocks: they move, stream and stay with them, and a placement is the same with
and without. Switching changes no weight. Needs peft (`batchgen[lora]`).
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from batchgen.errors import ModelError

NONE = "none"  # a row's own word for going without


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA file's weights, by component prefix."""

    name: str
    weight: float
    state: Mapping[str, torch.Tensor]
    alphas: Mapping[str, Any] | None

    def touches(self, component: str) -> bool:
        return any(key.startswith(f"{component}.") for key in self.state)


@dataclass(slots=True)
class Loras:
    """The adapters of a run. `use` makes one of them, or none, the active one of a stage's components."""

    adapters: tuple[Adapter, ...] = ()
    _modules: dict[str, nn.Module] = field(default_factory=dict)  # components with adapters attached
    _active: dict[str, tuple[str, float] | None] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Iterable[tuple[str, str, float]], pipeline_class: str) -> Loras:
        """(name, file, weight) of each. Raises ModelError where peft is missing, the model takes no LoRA, or a file is none."""
        given = tuple(given)
        if not given:
            return cls()
        if importlib.util.find_spec("peft") is None:
            raise ModelError("a LoRA needs peft", hint='install it with: python -m pip install "batchgen[lora]"')
        import diffusers

        pipeline = getattr(diffusers, pipeline_class, None)
        if not hasattr(pipeline, "lora_state_dict"):
            raise ModelError(f"{pipeline_class} takes no LoRA", hint="leave --lora out")
        return cls(tuple(_read(pipeline, *each) for each in given))

    def touching(self, components: Iterable[str]) -> bool:
        """Whether any adapter alters one of these components."""
        return any(self._state_prefix(adapter, name) for adapter in self.adapters for name in components)

    def _state_prefix(self, adapter: Adapter, component: str) -> str | None:
        """The prefix of the adapter's weights for this component. A file for one expert of two is for both."""
        if adapter.touches(component):
            return component
        base, _, number = component.rpartition("_")
        return base if number.isdigit() and base in ("transformer", "unet") and adapter.touches(base) else None

    def attach(self, component: str, module: nn.Module) -> None:
        """Add every adapter that touches the component, switched off. Raises ModelError for weights that do not fit it."""
        for adapter in self.adapters:
            prefix = self._state_prefix(adapter, component)
            if prefix is None:
                continue
            try:
                _load(module, adapter, prefix)
            except (ValueError, RuntimeError, KeyError) as error:
                why = str(error).splitlines()[0][:200]
                raise ModelError(f"LoRA {adapter.name} does not fit {component}: {why}", hint="it was made for another model") from error
            self._modules[component] = module
        if component in self._modules:
            _settle(module)
            self._active[component] = None

    def use(self, components: Iterable[str], asked: str | None) -> None:
        """Make `asked` (NAME or NAME:WEIGHT; None and "none": without) the active adapter of these components."""
        from diffusers.utils.peft_utils import set_adapter_layers, set_weights_and_activate_adapters

        wanted = self._wanted(asked)
        for component in components:
            module = self._modules.get(component)
            if module is None:
                continue
            active = wanted if wanted is not None and self._has(module, wanted[0]) else None
            if self._active[component] == active:
                continue
            if active is not None:
                set_weights_and_activate_adapters(module, [active[0]], [active[1]])
                set_adapter_layers(module, enabled=True)
            else:
                set_adapter_layers(module, enabled=False)
            self._active[component] = active

    def _wanted(self, asked: str | None) -> tuple[str, float] | None:
        if asked is None or asked == NONE:
            return None
        name, _, weight = asked.partition(":")
        for adapter in self.adapters:
            if adapter.name == name:
                return name, float(weight) if weight else adapter.weight
        raise ModelError(f"no LoRA named {name!r} was given to this run", hint=f"add --lora {name}=PATH")

    @staticmethod
    def _has(module: nn.Module, name: str) -> bool:
        return name in getattr(module, "peft_config", {})


def _read(pipeline: Any, name: str, path: str, weight: float) -> Adapter:
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    if "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters:
        options["return_alphas"] = True
    try:
        found = pipeline.lora_state_dict(path, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"LoRA {name}: {path} cannot be read: {str(error).splitlines()[0][:200]}") from error
    state, alphas = (found[0], found[1]) if isinstance(found, tuple) else (found, None)
    if not state or not any("lora" in key for key in state):
        raise ModelError(f"LoRA {name}: {path} holds no LoRA weights that this model's loader knows")
    return Adapter(name, weight, state, alphas or None)


def _load(module: Any, adapter: Adapter, prefix: str) -> None:
    state = {key: value for key, value in adapter.state.items() if key.startswith(f"{prefix}.")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft minds a second adapter in one model
        if hasattr(module, "load_lora_adapter"):
            module.load_lora_adapter(state, prefix=prefix, adapter_name=adapter.name, network_alphas=adapter.alphas)
        else:
            _inject(module, adapter, prefix, state)
    if adapter.name not in getattr(module, "peft_config", {}):
        raise ValueError("none of its weights belongs to a layer of the component")


def _inject(module: nn.Module, adapter: Adapter, prefix: str, state: dict[str, torch.Tensor]) -> None:
    """For models that are not diffusers' own: text encoders."""
    from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_peft
    from diffusers.utils.peft_utils import _create_lora_config
    from peft import inject_adapter_in_model, set_peft_model_state_dict

    plain = {key.removeprefix(f"{prefix}."): value for key, value in state.items()}
    plain = convert_state_dict_to_peft(convert_state_dict_to_diffusers(plain))
    if not hasattr(module, "text_model"):  # older files were made when CLIP had one more level
        plain = {key.removeprefix("text_model."): value for key, value in plain.items()}
    alphas = {key.removeprefix(f"{prefix}."): value for key, value in (adapter.alphas or {}).items() if key.startswith(f"{prefix}.")}
    ranks = {key: int(value.shape[1]) for key, value in plain.items() if key.endswith("lora_B.weight")}
    config = _create_lora_config(plain, alphas or None, None, ranks, is_unet=False)
    inject_adapter_in_model(config, module, adapter_name=adapter.name)
    known: dict[str, Any] = dict(getattr(module, "peft_config", {}))
    module.peft_config = known | {adapter.name: config}  # type: ignore[assignment]
    set_peft_model_state_dict(module, plain, adapter.name)


def _settle(module: nn.Module) -> None:
    """Adapters in the dtype of the layers they sit in, nothing trained, all switched off."""
    from diffusers.utils.peft_utils import set_adapter_layers
    from peft.tuners.tuners_utils import BaseTunerLayer

    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            base: Any = part.get_base_layer()
            for name, child in part.named_children():
                if name.startswith("lora_"):
                    child.to(base.weight.dtype)
    module.eval().requires_grad_(False)
    set_adapter_layers(module, enabled=False)
