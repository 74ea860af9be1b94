"""Reads a model folder's index and loads its components, each by its own class from its own subfolder, once.

Knows nothing of stages, placements or jobs. Weights come from safetensors files only and code only from the libraries,
unless the settings allow more. After a load it checks what the libraries do not: that every weight came from the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchgen.errors import ModelError

FEWEST_TOKENS = 16  # of a vocabulary, special tokens aside; the smallest, of bytes alone, has 256
_CONFIG_HINT = "Look at the files in {name}/, its config above all; fetch them again if they were changed, or belong to another model."
SAMPLE = 65536  # elements of a weight that the after-load check looks at before it looks at all of them


def quiet_libraries() -> None:
    """No progress bars and no log lines of the model libraries: a run has one display of its own."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity(logging.CRITICAL)
        library.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(diffusers|transformers|accelerate)\.")


class NoVocabularyError(ModelError):
    """A tokenizer whose vocabulary file is missing: its class makes one all the same."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A diffusers folder as its model_index.json describes it. Reading it loads nothing."""

    path: Path
    pipeline_class: str
    entries: dict[str, tuple[str, str]]  # component -> library, class; null entries left out
    settings: dict[str, Any]  # the index's plain values: boundary_ratio, is_distilled, ...
    absent: tuple[str, ...]  # null entries
    trust_remote_code: bool = False
    allow_pickle: bool = False
    _classes: dict[str, type] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> ModelFolder:
        """Raises ModelError where the index is missing or not an object."""
        index_file = Path(path) / "model_index.json"
        try:
            index = json.loads(index_file.read_text(encoding="utf-8"))
            name = index["_class_name"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{index_file}: not a readable pipeline index ({error})") from error
        entries, settings, absent = {}, {}, []
        for key, value in index.items():
            if key.startswith("_"):
                continue
            if isinstance(value, list) and len(value) == 2 and all(part is None or isinstance(part, str) for part in value):
                if value[0] is None or value[1] is None:
                    absent.append(key)
                else:
                    entries[key] = (str(value[0]), str(value[1]))
            else:
                settings[key] = value
        return cls(Path(path), name[-1] if isinstance(name, list) else str(name), entries, settings, tuple(absent),
                   trust_remote_code, allow_pickle)

    def component_class(self, name: str) -> type:
        """The class of an entry. Raises ModelError for code that is not the libraries' own, unless that is allowed."""
        if name not in self._classes:
            self._classes[name] = self._find_class(name)
        return self._classes[name]

    def _find_class(self, name: str) -> type:
        library, class_name = self.entries[name]
        if library in ("diffusers", "transformers"):
            found = getattr(importlib.import_module(library), class_name, None)
        elif library.isidentifier() and importlib.util.find_spec(f"diffusers.pipelines.{library}") is not None:
            found = getattr(importlib.import_module(f"diffusers.pipelines.{library}"), class_name, None)
        elif self.trust_remote_code:
            from diffusers.utils.dynamic_modules_utils import get_class_from_dynamic_module

            found = get_class_from_dynamic_module(
                str(self.path / name), module_file=f"{library}.py", class_name=class_name, trust_remote_code=True
            )
        else:
            raise ModelError(
                f"{self.path}: {name} is made by custom code ({library}.{class_name})",
                hint="look at that code, then allow it with --trust-remote-code",
            )
        if not isinstance(found, type):
            raise ModelError(f"{self.path}: {name} needs {library}.{class_name}, which the installed {library} does not have")
        return found

    @property
    def models(self) -> tuple[str, ...]:
        """Entries that carry weights, in index order."""
        return tuple(name for name in self.entries if issubclass(self.component_class(name), nn.Module))

    def is_autoencoder(self, name: str) -> bool:
        """Whether the component is entered by `encode` and `decode` (families of VAEs), not by `forward`."""
        cls = self.component_class(name)
        return hasattr(cls, "decode") and hasattr(cls, "encode")

    def _kwargs(self, name: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"subfolder": name, "local_files_only": True}
        if self.trust_remote_code and self.entries[name][0] == "transformers":
            kwargs["trust_remote_code"] = True
        return kwargs

    def load_plain(self, name: str) -> Any:
        """A component without weights: scheduler, tokenizer, processor, guider."""
        cls = self.component_class(name)
        try:
            made = cls.from_pretrained(str(self.path), **self._kwargs(name))  # type: ignore[attr-defined]
        except MemoryError:
            raise
        except Exception as error:  # a wrong value in a config comes out as whatever the class trips over first
            # without torchvision, processors of pictures and videos fail with whatever comes first
            lacking = cls.__name__.endswith("Processor") and importlib.util.find_spec("torchvision") is None
            if lacking:
                message = f"{self.path}: {name} ({cls.__name__}) cannot be made without torchvision"
                raise ModelError(message, hint='install it: python -m pip install "batchgen[edit]"') from error
            raise ModelError(f"{self.path}: {name} cannot be made: {_said(error)}", hint=_CONFIG_HINT.format(name=name)) from error
        _check_vocabulary(f"{self.path}: {name}", made)
        return made

    def load_model(self, name: str, dtype: torch.dtype, *, variant: str | None = None, device: torch.device | None = None) -> nn.Module:
        """A component with weights, in `dtype` (parts the class keeps in fp32 stay so), in eval mode and without gradients.

        `device` None: on the host, mapped from the file where its dtype is the file's. A CUDA device: straight onto it.
        Raises ModelError for missing, empty or wrong weights; MemoryErrors of the device pass through.
        """
        cls = self.component_class(name)
        kwargs = self._kwargs(name)
        kwargs["dtype" if self.entries[name][0] == "transformers" else "torch_dtype"] = dtype
        kwargs["use_safetensors"] = None if self.allow_pickle else True
        if variant is not None:
            kwargs["variant"] = variant
        if device is not None and device.type not in ("cpu", "meta"):
            kwargs["device_map"] = {"": str(device)}
        with self.naming(name):
            module, info = cls.from_pretrained(str(self.path), output_loading_info=True, **kwargs)  # type: ignore[attr-defined]
        module.eval().requires_grad_(False)
        check_loaded(name, module, info.get("missing_keys") or (), dtype)
        self._check_zeros(name, module)
        return module

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Whatever a library raises while it makes the component becomes a ModelError with its name: a wrong value in a config comes
        out as the first thing its class trips over. MemoryErrors of device and host pass through."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, ModelError):
            raise
        except Exception as error:
            raise ModelError(f"{self.path}: {name} does not load: {_said(error)}", hint=_CONFIG_HINT.format(name=name)) from error

    def _check_zeros(self, name: str, module: nn.Module) -> None:
        """A matrix of zeros is an error unless its file says so: a table that was never tied or loaded paints nonsense all night."""
        for key, weight in module.named_parameters():
            if weight.dim() > 1 and weight.numel() and not _any(weight):
                # loaders rename outer parts of a weight's name, never its own layer's
                layer = key.split(".")[-2:]
                stored = _read_tensors(self.path / name, partial(_is_of, layer))
                if all(_any(tensor) for tensor in stored.values()):
                    raise ModelError(f"{self.path}: {name}: {key} is all zeros, and not so in its file")

    def weightless(self, name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The component's class and config with weights on the meta device: for stages that only ask what it is.

        Persistent buffers are real, read from the file and put on `device`: some stages read them outside any forward
        (a VAE's latents_mean).
        """
        cls = self.component_class(name)
        with self.naming(name), torch.device("meta"), default_dtype(dtype):
            module: nn.Module = cls.from_config(cls.load_config(str(self.path), subfolder=name))  # type: ignore[attr-defined]
        module.eval().requires_grad_(False)
        wanted = {key for key, _ in module.named_buffers()} & set(module.state_dict())
        if wanted:
            for key, value in _read_tensors(self.path / name, wanted.__contains__).items():
                owner, _, leaf = key.rpartition(".")
                module.get_submodule(owner)._buffers[leaf] = value.to(device)
        return module


def _check_vocabulary(what: str, made: Any) -> None:
    """Raises NoVocabularyError for a tokenizer that knows next to nothing but its special tokens: it would read all prompts the same."""
    tokenizer = getattr(made, "tokenizer", made)
    if not (hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "get_added_vocab")):
        return
    words = len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys())
    if words < FEWEST_TOKENS:
        raise NoVocabularyError(f"{what} has no vocabulary: its file is missing or empty", hint="Fetch the tokenizer's folder again.")


def _said(error: BaseException) -> str:
    """What an error of a library says, with its class where that is half of the message."""
    line = first_line(error)
    plain = isinstance(error, (OSError, RuntimeError, ImportError)) or type(error) is ValueError or not str(error).strip()
    return line if plain else f"{type(error).__name__}: {line}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class default_dtype:
    """`torch.set_default_dtype` for a block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


def _read_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found.update({name: tensors.get_tensor(name) for name in tensors.keys() if wanted(name)})  # noqa: SIM118  no mapping
    return found


def check_loaded(name: str, module: nn.Module, missing: Any, dtype: torch.dtype) -> None:
    """What a loader lets pass with a log line at most. Raises ModelError, naming the first weights at fault."""
    tied = {id(tensor) for key, tensor in module.state_dict(keep_vars=True).items() if key not in set(missing)}
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    lost = [key for key in missing if key in tensors and id(tensors[key]) not in tied]
    if lost:
        raise ModelError(
            f"{name}: {len(lost)} weights are not in its files, {lost[0]} first", hint="the download or conversion is incomplete"
        )
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise ModelError(f"{name}: {key} was not loaded")
    for key, parameter in module.named_parameters():
        if parameter.dtype.is_floating_point and not looks_plausible(parameter):
            raise ModelError(f"{name}: {key} holds values that are not numbers", hint="the weight file is damaged")
    floating = {parameter.dtype for parameter in module.parameters() if parameter.dtype in (torch.float16, torch.bfloat16, torch.float32)}
    if floating and dtype not in floating:
        raise ModelError(f"{name}: asked for {dtype}, loaded as {', '.join(sorted(map(str, floating)))}")


def _is_of(layer: list[str], name: str) -> bool:
    return name.split(".")[-2:] == layer


def _any(weight: torch.Tensor) -> bool:
    """Whether anything in it is not zero; mostly answered by its first elements."""
    flat = weight.detach().reshape(-1)
    return bool(flat[:SAMPLE].any()) or bool(flat.any())


def looks_plausible(parameter: torch.Tensor) -> bool:
    flat = parameter.detach().view(-1) if parameter.is_contiguous() else parameter.detach().reshape(-1)
    if flat.numel() == 0:
        return True
    step = max(1, flat.numel() // SAMPLE)
    return bool(torch.isfinite(flat[::step].float()).all())


def signature_defaults(function: Any) -> dict[str, Any]:
    """Parameter name -> default of a callable, for those that have one."""
    parameters = inspect.signature(function).parameters.values()
    return {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}


def torch_dtype(name: str) -> torch.dtype:
    """`bfloat16` -> torch.bfloat16. Raises ModelError for a name that torch does not have."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"unknown dtype {name!r}")
    return found
