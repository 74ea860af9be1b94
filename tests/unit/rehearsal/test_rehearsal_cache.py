"""The cache of rehearsals: what changes a key, what is read back, and that damage is a miss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.plan.records import Rehearsed, RehearsedComponent, StageProfile
from batchgen.rehearsal import cache, learned

FOUND = Rehearsed(
    (RehearsedComponent("vae", 10, 4, (3, 3), 5),),
    (StageProfile("decode", "64x64", 1, ("vae",), 10, 20, 5, 7, (("vae", 1),)),),
    ("tokenizer: a stand-in",),
)
REQUEST: dict[str, Any] = {"shapes": [[64, 64]], "batches": [1, 2], "dtypes": {"vae": "bfloat16"}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "vae").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    (folder / "vae" / "config.json").write_text('{"a": 1}')
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"weights")
    return folder


def test_what_was_stored_comes_back(tmp_path: Path, model: Path) -> None:
    entry = cache.key(model, REQUEST)
    assert cache.load(tmp_path, entry) is None
    cache.store(tmp_path, entry, FOUND)
    assert cache.load(tmp_path, entry) == FOUND
    assert [path.suffix for path in (tmp_path / "rehearsals").iterdir()] == [".json"]


def changed(model: Path, what: str) -> tuple[Path, dict[str, Any]]:
    request = json.loads(json.dumps(REQUEST))
    if what == "a config":
        (model / "vae" / "config.json").write_text('{"a": 2}')
    elif what == "the index":
        (model / "model_index.json").write_text('{"x": 1}')
    elif what == "a dtype":
        request["dtypes"]["vae"] = "float32"
    elif what == "a shape":
        request["shapes"] = [[64, 96]]
    elif what == "the batches":
        request["batches"] = [1]
    return model, request


@pytest.mark.parametrize("what", ["a config", "the index", "a dtype", "a shape", "the batches"])
def test_what_changes_the_numbers_changes_the_key(model: Path, what: str) -> None:
    before = cache.key(model, REQUEST)
    assert cache.key(*changed(model, what)) != before


def test_a_library_s_version_changes_the_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.key(model, REQUEST)
    monkeypatch.setattr(cache, "library_versions", lambda: {"torch": "0"})
    assert cache.key(model, REQUEST) != before


def test_weights_and_places_do_not_change_the_key(model: Path, tmp_path: Path) -> None:
    before = cache.key(model, REQUEST)
    (model / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"others")
    assert cache.key(model, REQUEST) == before
    assert cache.key(model.rename(tmp_path / "moved"), REQUEST) == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"components": 3}', '{"components": [], "profiles": [{"x": 1}], "notes": []}'])
def test_a_damaged_entry_is_a_missing_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "rehearsals").mkdir()
    (tmp_path / "rehearsals" / "e.json").write_text(content)
    assert cache.load(tmp_path, "e") is None


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache.store(tmp_path / "file", "e", FOUND)
    assert cache.load(tmp_path / "file", "e") is None


PLACES = {
    "its own variable": ({"BATCHGEN_CACHE": "/x", "XDG_CACHE_HOME": "/y"}, "/x"),
    "the user's cache folder": ({"XDG_CACHE_HOME": "/y"}, "/y/batchgen"),
}


@pytest.mark.parametrize(("environment", "place"), PLACES.values(), ids=PLACES.keys())
def test_where_the_cache_lies(environment: dict[str, str], place: str) -> None:
    assert cache.cache_dir(environment) == Path(place)


def test_runs_teach_and_newer_ones_count_as_much_as_all_before(tmp_path: Path) -> None:
    assert learned.efficiencies(tmp_path, "RTX 4090", "X") == {}
    learned.learn(tmp_path, "RTX 4090", "X", {"denoise": 0.4})
    learned.learn(tmp_path, "RTX 4090", "X", {"denoise": 0.6, "decode": 0.2})
    learned.learn(tmp_path, "RTX 4090", "Y", {"denoise": 0.1})
    assert learned.efficiencies(tmp_path, "RTX 4090", "X") == pytest.approx({"denoise": 0.5, "decode": 0.2})
    assert learned.efficiencies(tmp_path, "H100", "X") == {}


@pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 1e-9])
def test_what_no_device_reaches_is_not_learned(tmp_path: Path, value: float) -> None:
    learned.learn(tmp_path, "card", "X", {"denoise": value})
    assert learned.efficiencies(tmp_path, "card", "X") == {}


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_lesson_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "efficiency.json").write_text(content)
    assert learned.efficiencies(tmp_path, "card", "X") == {}
