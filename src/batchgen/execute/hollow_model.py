"""A model of hollow components, ready to be played: built from the configs of its folder, on the stages that a run would take.

The same over loaded components is a real run under the same tracker, which is how the rehearsal is checked. What is played on it, and
with what, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from batchgen.errors import ModelError
from batchgen.execute.arguments import block_names, guidance_rules
from batchgen.execute.guidance import GuidanceRules
from batchgen.execute.load import ModelFolder, NoVocabularyError, first_line, quiet_libraries, torch_dtype
from batchgen.execute.moving import chunks_of, pieces_of, stays
from batchgen.execute.stages import Stages, build_stages
from batchgen.execute.streaming import split_chunks
from batchgen.rehearsal import hollow
from batchgen.rehearsal.calls import Scene
from batchgen.rehearsal.standins import stand_in_tokenizer
from batchgen.rehearsal.tiles import share_tiles

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class HollowFolder(ModelFolder):
    """A model folder whose components are hollow. Files it lacks (tokenizers of a model known by its configs) get stand-ins."""

    hollows: dict[str, nn.Module] = field(default_factory=dict)
    stood_in: list[str] = field(default_factory=list)
    tokens: int = 60

    def weightless(self, name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The hollow component itself: it has all that a weightless copy has."""
        return self.hollows[name]

    def load_plain(self, name: str) -> Any:
        if any((self.path / name).glob("*")):
            with suppress(NoVocabularyError):  # of a model whose configs alone are here
                return ModelFolder.load_plain(self, name)
        self.stood_in.append(name)
        return stand_in_tokenizer(self.entries[name][1], self.tokens)


@dataclass(slots=True)
class Rehearsal:
    """A model with hollow components, ready to be played at any shape and batch."""

    stages: Stages
    rules: GuidanceRules
    scene: Scene
    components: dict[str, nn.Module]
    weights: dict[str, int]  # bytes as loaded, each storage once
    parameters: dict[str, int]
    blocks: dict[str, tuple[int, ...]]  # bytes of each block that can stream, in registration order
    stood_in: tuple[str, ...]
    real: bool = False
    told: Callable[[str], None] | None = None  # hears what is played
    idle: frozenset[str] = frozenset()  # components that a run of the list never loads


def hollow_rehearsal(
    path: str, dtypes: Mapping[str, str], *, tokens: int = 60, trust_remote_code: bool = False, inputs: Sequence[str] = (),
) -> Rehearsal:
    """Builds the hollow components of a model folder from their configs. `dtypes`: component -> torch's name, as it would load.

    Raises ModelError where a class cannot be built from its config.
    """
    quiet_libraries()
    read = ModelFolder.read(path, trust_remote_code=trust_remote_code)
    folder = HollowFolder(
        read.path, read.pipeline_class, read.entries, read.settings, read.absent, read.trust_remote_code, read.allow_pickle, tokens=tokens)
    scene = Scene()
    wanted = {name: torch_dtype(dtypes.get(name, "float32")) for name in folder.models}
    weights, parameters, blocks = {}, {}, {}
    for name, dtype in wanted.items():
        module = hollow_component(folder, name, dtype, scene)
        folder.hollows[name] = module
        weights[name], parameters[name] = hollow.weight_bytes(module), hollow.parameter_count(module)
        blocks[name] = block_bytes(name, module)
        # language models keep caches and VAEs hand a cache of frames from block to block: each of their blocks is played
        hollow.enter(module, name, scene, repeats=folder.entries[name][0] == "diffusers" and not folder.is_autoencoder(name))
    stages = build_stages(folder, CPU, wanted, components=folder.hollows, inputs=inputs)
    return Rehearsal(
        stages, guidance_rules(stages), scene, dict(folder.hollows), weights, parameters, blocks, tuple(dict.fromkeys(folder.stood_in)))


def real_rehearsal(path: str, dtypes: Mapping[str, str], *, inputs: Sequence[str] = ()) -> Rehearsal:
    """The same over loaded components, for measuring a real run with the same tracker."""
    quiet_libraries()
    folder = ModelFolder.read(path)
    scene = Scene()
    wanted = {name: torch_dtype(dtypes[name]) for name in folder.models}
    modules = {name: folder.load_model(name, dtype) for name, dtype in wanted.items()}
    for name, module in modules.items():
        hollow.count_calls(module, name, scene)
    stages = build_stages(folder, CPU, wanted, components=modules, inputs=inputs)
    weights = {name: hollow.weight_bytes(module) for name, module in modules.items()}
    return Rehearsal(stages, guidance_rules(stages), scene, modules, weights, {}, {}, (), real=True)


def hollow_component(folder: HollowFolder, name: str, dtype: torch.dtype, scene: Scene) -> nn.Module:
    """One component of the folder. Raises ModelError where its class cannot be built from its config."""
    library, class_name = folder.entries[name]
    cls: Any = folder.component_class(name)
    try:
        if library == "transformers":
            config = cls.config_class.from_pretrained(str(folder.path), subfolder=name, local_files_only=True)
        else:
            config = cls.load_config(str(folder.path), subfolder=name, local_files_only=True)
        return hollow.build(cls, config, dtype, scene, library=library)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{folder.path}: {name} ({class_name}) cannot be built from its config: {first_line(error)}") from error


def block_bytes(name: str, module: nn.Module) -> tuple[int, ...]:
    """Bytes that stream with each repeated block, in registration order, as the executor splits the module."""
    _, blocks = split_chunks(name, module)
    return tuple(sum(chunk.size_bytes for chunk in chunks) for _, _, chunks in blocks)


def staying_bytes(name: str, module: nn.Module) -> int:
    """Bytes of the small buffers that the executor never takes off the device."""
    return sum(chunk.size_bytes for chunk in chunks_of(pieces_of(name, module)) if stays(chunk))


def on_road(rehearsal: Rehearsal, dtypes: Mapping[str, str], inputs: Sequence[str]) -> Rehearsal:
    """The same hollow components on the road that jobs with these picture inputs take."""
    wanted = {name: torch_dtype(dtypes.get(name, "float32")) for name in rehearsal.components}
    stages = build_stages(rehearsal.stages.folder, CPU, wanted, components=rehearsal.components, inputs=block_names(inputs))
    return replace(rehearsal, stages=stages, rules=guidance_rules(stages))


def tile(rehearsal: Rehearsal) -> bool:
    """Lets the VAE decode in tiles; what was played without them counts no more. False where it cannot."""
    vae: Any = rehearsal.components.get("vae")
    if vae is None or not hasattr(vae, "enable_tiling"):
        return False
    vae.enable_tiling()
    share_tiles(vae, rehearsal.scene)
    rehearsal.scene.components["vae"].records.clear()
    return True
