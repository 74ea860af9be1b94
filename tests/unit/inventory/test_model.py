"""Model folders: what they are made of, and one clear answer for each way in which they are not a pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_models import INDEX, write_json, write_weights

from batchgen.errors import ModelError, UsageError
from batchgen.inventory.model import ModelOptions, looks_like_hub_id, resolve
from batchgen.inventory.records import ModelFacts

CASES = Path(__file__).parents[2] / "cases" / "models"


def facts_of(folder: Path, platform: str = "cpu", **options: Any) -> ModelFacts:
    return resolve(str(folder), ModelOptions(**options), platform=platform)  # type: ignore[arg-type]


def test_a_folder_gives_components_in_index_order(model: Path) -> None:
    facts = facts_of(model, "cuda")
    assert [(part.name, part.parameters, part.bytes_as_loaded, part.dtype, part.stored_dtypes) for part in facts.components] == [
        ("text_encoder", 6, 12, "bfloat16", (("BF16", 6),)),
        ("transformer", 8, 16, "bfloat16", (("BF16", 8),)),
        ("vae", 4, 8, "bfloat16", (("BF16", 4),)),
    ]
    assert facts.other == ("scheduler", "tokenizer")
    assert (facts.kind, facts.pipeline_class, facts.folder) == ("folder", "QwenImagePipeline", str(model.resolve()))
    assert facts.component("vae").files[0].path == "vae/diffusion_pytorch_model.safetensors"


def test_plain_settings_of_the_index_are_kept_as_json(new_model: Callable[..., Path]) -> None:
    index = INDEX | {"boundary_ratio": 0.875, "expand_timesteps": True, "layers": [1, 2], "note": "x", "safety_checker": [None, None]}
    facts = facts_of(new_model(index=index))
    assert facts.index == (("boundary_ratio", "0.875"), ("expand_timesteps", "true"), ("layers", "[1, 2]"), ("note", '"x"'))
    assert facts.absent == ("safety_checker",)


DTYPES: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "on a CPU everything is float32": ("cpu", "bfloat16", {}, {"text_encoder": "float32", "transformer": "float32", "vae": "float32"}),
    "on CUDA 16-bit weights are bfloat16": (
        "cuda",
        "float16",
        {},
        {"text_encoder": "bfloat16", "transformer": "bfloat16", "vae": "bfloat16"},
    ),
    "a float32 VAE stays float32 there": ("cuda", "float32", {}, {"text_encoder": "bfloat16", "transformer": "bfloat16", "vae": "float32"}),
    "the user's word for all": (
        "cpu",
        "bfloat16",
        {"dtype": "fp16"},
        {"text_encoder": "float16", "transformer": "float16", "vae": "float16"},
    ),
    "the user's word for one": (
        "cuda",
        "bfloat16",
        {"dtype": "bf16", "component_dtypes": (("vae", "fp32"),)},
        {"text_encoder": "bfloat16", "transformer": "bfloat16", "vae": "float32"},
    ),
}


@pytest.mark.parametrize(("platform", "stored", "options", "expected"), DTYPES.values(), ids=DTYPES.keys())
def test_the_dtype_a_component_loads_in(
    new_model: Callable[..., Path],
    platform: str,
    stored: str,
    options: dict[str, Any],
    expected: dict[str, str],
) -> None:
    facts = facts_of(new_model(dtype=stored), platform, **options)
    assert {part.name: part.dtype for part in facts.components} == expected
    assert facts.component("vae").bytes_as_loaded == 4 * (4 if expected["vae"] == "float32" else 2)


def test_quantised_weights_count_as_stored(model: Path) -> None:
    write_json(model / "transformer" / "config.json", {"quantization_config": {"quant_method": "x"}})
    write_weights(model / "transformer" / "diffusion_pytorch_model.safetensors", {"w": ("uint8", [10]), "s": ("float32", [2])})
    assert facts_of(model, "cuda").component("transformer").bytes_as_loaded == 18


def shard(model: Path, suffix: str = "", dtype: str = "bfloat16", size: int = 5) -> None:
    folder = model / "transformer"
    dotted = f".{suffix}" if suffix else ""
    for number, name in ((1, "x"), (2, "y")):
        write_weights(folder / f"diffusion_pytorch_model{dotted}-0000{number}-of-00002.safetensors", {name: (dtype, [size])})
    write_json(
        folder / f"diffusion_pytorch_model.safetensors.index{dotted}.json",
        {
            "weight_map": {
                name: f"diffusion_pytorch_model{dotted}-0000{number}-of-00002.safetensors" for number, name in ((1, "x"), (2, "y"))
            }
        },
    )


def test_shards_are_counted_together_and_never_with_a_whole_file_beside_them(model: Path) -> None:
    shard(model)
    part = facts_of(model).component("transformer")
    assert part.parameters == 10
    assert [Path(file.path).name for file in part.files] == [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_the_asked_variant_is_loaded_and_only_it(model: Path) -> None:
    shard(model, "fp16", "float16", size=3)
    facts = facts_of(model, variant="fp16")
    assert (facts.component("transformer").variant, facts.component("transformer").parameters) == ("fp16", 6)
    assert (facts.component("vae").variant, facts.component("vae").parameters) == (None, 4)
    assert [note for note in facts.notes if note.startswith("vae")] == ["vae: has no 'fp16' files; its plain ones are used"]
    assert facts_of(model).component("transformer").parameters == 8


def test_the_only_variant_there_is_is_taken_with_a_note(model: Path) -> None:
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(model / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    facts = facts_of(model)
    assert facts.component("vae").variant == "fp16"
    assert facts.notes == ("vae: has only 'fp16' files; they are used",)


def test_other_frameworks_and_pickles_beside_safetensors_count_nothing(model: Path) -> None:
    for name in ("diffusion_pytorch_model.bin", "diffusion_flax_model.msgpack", "model.onnx"):
        (model / "vae" / name).write_bytes(b"x" * 100)
    assert [Path(file.path).name for file in facts_of(model).component("vae").files] == ["diffusion_pytorch_model.safetensors"]


def test_pickle_weights_load_with_consent_only(model: Path) -> None:
    (model / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (model / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="--allow-pickle"):
        facts_of(model)
    part = facts_of(model, allow_pickle=True).component("vae")
    assert (part.pickle, part.bytes_as_loaded) == (True, None)


def break_it(model: Path, what: str) -> None:
    vae, transformer = model / "vae", model / "transformer"
    if what == "missing shard":
        shard(model)
        (transformer / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    elif what == "shards without index":
        shard(model)
        (transformer / "diffusion_pytorch_model.safetensors").unlink()
        (transformer / "diffusion_pytorch_model.safetensors.index.json").unlink()
    elif what == "index outside":
        shard(model)
        write_json(transformer / "diffusion_pytorch_model.safetensors.index.json", {"weight_map": {"x": "../../other.safetensors"}})
    elif what == "damaged shard index":
        (transformer / "diffusion_pytorch_model.safetensors.index.json").write_text("{", encoding="utf-8")
    elif what == "no weights":
        (vae / "diffusion_pytorch_model.safetensors").unlink()
    elif what == "odd name":
        (vae / "diffusion_pytorch_model.safetensors").rename(vae / "my_vae.safetensors")
    elif what == "no folder":
        (model / "scheduler" / "scheduler_config.json").unlink()
        (model / "scheduler").rmdir()
    elif what == "damaged config":
        (vae / "config.json").write_text("[", encoding="utf-8")
    elif what == "two variants":
        for name in ("fp16", "bf16"):
            write_weights(vae / f"diffusion_pytorch_model.{name}.safetensors", {"c": ("bfloat16", [4])})
        (vae / "diffusion_pytorch_model.safetensors").unlink()
    elif what == "own code":
        write_json(model / "text_encoder" / "config.json", {"auto_map": {"AutoModel": "modeling.Own"}})
        write_json(model / "model_index.json", INDEX | {"text_encoder": ["transformers", "AutoModel"]})


BROKEN = {
    "missing shard": "transformer: .* names shards that are not there: diffusion_pytorch_model-00002-of-00002.safetensors",
    "shards without index": "transformer: has shards .* but not their index file",
    "index outside": "names files outside the component's folder",
    "damaged shard index": "diffusion_pytorch_model.safetensors.index.json is damaged",
    "no weights": "vae: its folder has no weights",
    "odd name": "vae: none of its weight files has a name that its library loads .my_vae.safetensors",
    "no folder": "scheduler: its folder is missing",
    "damaged config": r"vae/config\.json is damaged",
    "two variants": "vae: has no plain weights; there is bf16, fp16: choose with --variant",
    "own code": "text_encoder: its config.json brings code of its own .* --trust-remote-code",
}


@pytest.mark.parametrize(("what", "said"), BROKEN.items(), ids=BROKEN.keys())
def test_what_is_broken_is_named_with_its_component(model: Path, what: str, said: str) -> None:
    break_it(model, what)
    with pytest.raises(ModelError, match=said):
        facts_of(model)


INDEXES: dict[str, tuple[object, str]] = {
    "half null": ({"vae": [None, "AutoencoderKL"]}, "vae: .* half null"),
    "a list as library": ({"vae": [["nested"], "X"]}, "vae: .* should be two texts"),
    "three items": ({"vae": ["diffusers", "AutoencoderKL", {}]}, "vae: .* is not a pair"),
    "a required part null": ({"vae": [None, None]}, "vae: null, but QwenImagePipeline cannot do without it"),
    "a name that is a path": ({"../up": ["diffusers", "AutoencoderKL"]}, "is not a folder name"),
    "a class name that is a number": ({"_class_name": 3}, "_class_name: .* should be text"),
    "a foreign pipeline class": ({"_class_name": ["mine", "Own"]}, "the pipeline itself: class 'Own' from the module 'mine'"),
    "an unknown pipeline class": ({"_class_name": "NoSuchPipeline"}, "diffusers 0[.0-9]+ has no class 'NoSuchPipeline'"),
    "a foreign component": ({"vae": ["mine", "OwnVAE"]}, "vae: class 'OwnVAE' from the module 'mine'"),
    "an unknown class of diffusers": ({"vae": ["diffusers", "AutoencoderNever"]}, "vae: diffusers .* has no class 'AutoencoderNever'"),
}


@pytest.mark.parametrize(("changes", "said"), INDEXES.values(), ids=INDEXES.keys())
def test_odd_entries_of_the_index_are_named(new_model: Callable[..., Path], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        facts_of(new_model(index=INDEX | changes))


@pytest.mark.parametrize(
    ("changes", "newer"),
    [
        ({"_class_name": "NoSuchPipeline"}, True), ({"vae": ["diffusers", "AutoencoderNever"]}, True),
        ({"_class_name": ["mine", "Own"]}, False), ({"vae": ["mine", "OwnVAE"]}, False),
    ],
)
def test_a_class_that_diffusers_does_not_have_may_be_newer(new_model: Callable[..., Path], changes: dict[str, Any], newer: bool) -> None:
    with pytest.raises(ModelError) as caught:
        facts_of(new_model(index=INDEX | changes))
    assert caught.value.hint
    assert "--trust-remote-code" in caught.value.hint
    assert ("pip install -U diffusers" in caught.value.hint) == newer


@pytest.mark.parametrize(
    "address", ["https://huggingface.co/Owner/Name", "http://hf.co/Owner/Name/tree/main", "huggingface.co/Owner/Name?x=1", "https://huggingface.co/Owner/Name#files"],
)
def test_the_address_of_a_model_page_is_met_with_its_id(address: str) -> None:
    with pytest.raises(ModelError, match="did you mean 'Owner/Name'"):
        resolve(address, ModelOptions(), platform="cpu")


def test_foreign_code_passes_with_consent_and_nothing_of_it_was_imported(new_model: Callable[..., Path]) -> None:
    folder = new_model(index=INDEX | {"vae": ["mine", "OwnVAE"]})
    facts = facts_of(folder, trust_remote_code=True)
    assert facts.component("vae").library == "mine"
    assert "mine" not in sys.modules


FIELD_CASES = {
    "b46_two_experts": "transformer_2: its folder is missing",
    "b55_variant_mixed": "unet: .* names shards that are not there: diffusion_pytorch_model-00003-of-00003.safetensors",
    "b56_null_component": "image_encoder: .* half null",
    "b58_custom_code": "scheduler: .* should be two texts",
    "b62_empty_index": r"model_index\.json is empty",
    "b62_not_diffusers": "is not a pipeline.* describes LlamaForCausalLM",
    "b62_single_file": "is a single-file checkpoint",
    "b62_single_file/model.safetensors": "is a single-file checkpoint",
    "nothing/here/at/all": "no model folder 'nothing/here/at/all'|there is no model folder",
}


@pytest.mark.parametrize(("name", "said"), FIELD_CASES.items(), ids=FIELD_CASES.keys())
def test_folders_seen_in_the_field_get_their_own_answer(name: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        facts_of(CASES / name)
    assert caught.value.exit_code == 2


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        facts_of(CASES / "b55_variant_mixed")
    text = str(caught.value)
    assert all(word in text for word in ("text_encoder: only pickle weights", "unet: ", "vae: ", "the file is empty"))


@pytest.mark.parametrize("content", ["{", "[]", "nul", '"x"'], ids=["cut", "a list", "a word cut", "a text"])
def test_a_corrupt_index_is_named_with_its_path(model: Path, content: str) -> None:
    (model / "model_index.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"model_index\.json"):
        facts_of(model)


def test_the_revision_follows_configs_and_headers_and_not_the_place(new_model: Callable[..., Path]) -> None:
    first, second = new_model("one"), new_model("two")
    assert facts_of(first).revision == facts_of(second).revision
    (second / "README.md").write_text("words", encoding="utf-8")
    assert facts_of(first).revision == facts_of(second).revision
    write_json(second / "scheduler" / "scheduler_config.json", {"shift": 3.0})
    with_config = facts_of(second).revision
    assert with_config != facts_of(first).revision
    write_weights(second / "vae" / "diffusion_pytorch_model.safetensors", {"c": ("float32", [4])})
    assert facts_of(second).revision != with_config


def test_a_dtype_for_an_unknown_component_is_refused_with_the_known_names(model: Path) -> None:
    with pytest.raises(UsageError, match=r"'vea'.*text_encoder, transformer, vae"):
        facts_of(model, component_dtypes=(("vea", "fp32"),))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Qwen/Qwen-Image", True),
        ("a/b.c_d", True),
        ("name", False),
        ("a/b/c", False),
        ("./x", False),
        ("a/../b", False),
        ("a b/c", False),
        ("-a/b", False),
    ],
)
def test_hub_ids_are_told_from_paths(text: str, good: bool) -> None:
    assert looks_like_hub_id(text) is good


def test_reading_a_model_loads_no_heavy_library(model: Path) -> None:
    code = (
        "import sys, json\nfrom batchgen.inventory.model import *\n"
        f"facts = resolve({str(model)!r}, ModelOptions(), platform='cpu')\n"
        "heavy = ('torch', 'diffusers', 'transformers', 'huggingface_hub', 'pandas')\n"
        "print(json.dumps([facts.revision, [name for name in heavy if name in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [facts_of(model).revision, []]
