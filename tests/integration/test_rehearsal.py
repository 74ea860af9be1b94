"""The rehearsal held against real runs: the same stages, the same tracker, once over hollow components and once over loaded ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.errors import ModelError
from batchgen.execute import hollow_model, playing, rehearse
from batchgen.execute.load import ModelFolder, torch_dtype
from batchgen.inventory.known import known_models
from batchgen.jobs import ShapeKey
from batchgen.plan.batching import Curve
from batchgen.plan.records import StageProfile
from batchgen.rehearsal import cache, hollow
from batchgen.rehearsal.calls import Scene, small_collections
from batchgen.rehearsal.live import LiveBytes
from batchgen.rehearsal.tiles import share_tiles
from hollow_twins import dtypes, shape

TinyFolder = Callable[[str], Path]


@pytest.mark.parametrize("family", ["wan21", "sd3", "qwen_image", "ltx2", "hunyuan_video15"])
def test_pitfall_20_a_hollow_component_has_the_weights_of_a_loaded_one(family: str, tiny_folder: TinyFolder) -> None:
    """Names, shapes and dtypes in bfloat16: parts that a class keeps in float32 (Wan's norms) too."""
    folder = tiny_folder(family)
    read = ModelFolder.read(folder)
    hollow_run = hollow_model.hollow_rehearsal(str(folder), dtypes(folder, "bfloat16"))
    for name in read.models:
        loaded = read.load_model(name, torch_dtype("bfloat16"))
        made = hollow_run.components[name]
        assert _held(made) == _held(loaded), name
        assert hollow_run.weights[name] == hollow.weight_bytes(loaded)


def _held(module: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}


@pytest.fixture
def deep_folder(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    """Qwen-Image of six blocks: configs only, as a model known without its files."""
    folder = tmp_path / "deep"
    shutil.copytree(tiny_folder("qwen_image"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 6}))
    return folder


def test_one_block_played_for_all_gives_what_playing_each_gives(deep_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = playing.job_of(shape("qwen_image", 64, 96), "a red circle")
    shared = hollow_model.hollow_rehearsal(str(deep_folder), dtypes(deep_folder))
    once = playing.play(shared, job, 2)
    monkeypatch.setattr(hollow, "share_blocks", lambda module, stage: None)
    single = hollow_model.hollow_rehearsal(str(deep_folder), dtypes(deep_folder))
    assert playing.play(single, job, 2) == once


class _Frames(torch.nn.Module):
    """Blocks that hand a cache from one to the next, as the VAEs of clips do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        for number, block in enumerate(self.blocks):
            block.forward = self._remembering(block, number)  # type: ignore[method-assign]

    @staticmethod
    def _remembering(block: torch.nn.Module, number: int) -> Callable[..., torch.Tensor]:
        def forward(value: torch.Tensor, cache: list[int]) -> torch.Tensor:
            cache[0] += 1
            return torch.nn.functional.linear(value, block.weight)  # type: ignore[arg-type]

        return forward

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, int]:
        cache = [0]
        for block in self.blocks:
            value = block(value, cache)
        return value, cache[0]


def test_blocks_that_write_into_their_arguments_are_all_played() -> None:
    scene = Scene()
    with scene.fake:
        module = _Frames()
    hollow.enter(module, "frames", scene, repeats=True)
    for _ in range(2):  # the second time a record would be at hand
        tracker = LiveBytes(module.parameters(), fake=scene.fake)
        with scene.following(tracker):
            _, count = module(torch.zeros(2, 4))
        assert count == 3


def test_equal_calls_are_played_once_and_all_are_counted(deep_folder: Path) -> None:
    run = hollow_model.hollow_rehearsal(str(deep_folder), dtypes(deep_folder))
    job = playing.job_of(ShapeKey(64, 64, None, None, 20, 4.0, None, None, None, ()), "a red circle")
    denoise = {profile.stage: profile for profile in playing.play(run, job, 1)}["denoise"]
    assert denoise.calls == (("transformer", 40),)
    assert run.scene.components["transformer"].played <= 4


def test_a_missing_tokenizer_is_stood_in_for_and_told(deep_folder: Path) -> None:
    shutil.rmtree(deep_folder / "tokenizer")
    found = rehearse.rehearse(str(deep_folder), dtypes(deep_folder), [shape("qwen_image", 64, 64)], [1], tokens=77)
    assert found.notes == ("tokenizer: a stand-in of 77 tokens, for its files are not here",)
    assert [profile.stage for profile in found.profiles] == ["text_encoder", "denoise", "decode"]


def test_tiles_need_less_than_a_whole_decode(deep_folder: Path) -> None:
    large = ShapeKey(768, 768, None, None, 2, 4.0, None, None, None, ())
    found = rehearse.rehearse(str(deep_folder), dtypes(deep_folder), [large], [1], tiled=True)
    decodes = {profile.tiled: profile.activation_bytes for profile in found.profiles if profile.stage == "decode"}
    assert decodes[True] < decodes[False]


@pytest.mark.long
def test_tiles_that_stand_for_others_cost_what_all_of_them_cost(deep_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = ShapeKey(832, 576, None, None, 2, 4.0, None, None, None, ())
    found = {}
    for sharing in (True, False):
        if not sharing:
            monkeypatch.setattr(hollow_model, "share_tiles", lambda vae, stage: None)
        profiles = rehearse.rehearse(str(deep_folder), dtypes(deep_folder), [large], [1], tiled=True).profiles
        found[sharing] = [profile for profile in profiles if profile.tiled]
    assert found[True] == found[False]
    assert [profile.stage for profile in found[True]] == ["decode"]


class _Tiled(torch.nn.Module):
    """Decodes tiles of frames with a cache of the frame before, as the VAEs of clips do it; counts what is played of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.decoder = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.played = 0
        plain = self.decoder.forward

        def forward(frame: torch.Tensor, cache: list[torch.Tensor | None], place: list[int]) -> torch.Tensor:
            self.played += 1
            before = cache[place[0]]
            cache[place[0]] = frame.clone()
            place[0] += 1
            return plain(frame if before is None else torch.cat([before, frame]))

        self.decoder.forward = forward  # type: ignore[method-assign]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.first(value)
        rows: list[torch.Tensor] = []
        for tile in range(6):
            cache: list[torch.Tensor | None] = [None]
            rows.extend(self.decoder(value[tile : tile + 1], cache, [0]) for _ in range(3))
        return torch.cat(rows)


def test_a_tile_s_cache_of_frames_is_part_of_what_stands_for_it() -> None:
    peaks, shapes, played, flops = [], [], [], []
    for sharing in (False, True):
        scene = Scene()
        with scene.fake:
            module = _Tiled()
        hollow.enter(module, "tiled", scene)
        if sharing:
            share_tiles(module, scene)
        tracker = LiveBytes(module.parameters(), fake=scene.fake)
        with scene.following(tracker):
            shapes.append(tuple(module(torch.zeros(6, 4)).shape))
        peaks.append(tracker.peak)
        flops.append(tracker.flops)
        played.append(module.played)
    assert shapes == [(30, 4)] * 2  # one row of each tile's first frame, two of the others
    assert (peaks[0], flops[0]) == (peaks[1], flops[1])
    assert played == [18, 2]  # a tile's first frame, and one with a frame before it


def test_a_model_of_words_alone_takes_no_other_road_because_of_a_size(deep_folder: Path) -> None:
    odd = ShapeKey(1000, 1000, None, None, 2, 4.0, None, None, None, ())
    with pytest.raises(Exception, match=r"shape|size|divisible|multiple"):
        rehearse.rehearse(str(deep_folder), dtypes(deep_folder), [odd], [1])


def test_every_stage_is_told_before_it_is_played(deep_folder: Path) -> None:
    told: list[str] = []
    small = ShapeKey(64, 64, None, None, 2, None, None, None, None, ())
    rehearse.rehearse(str(deep_folder), dtypes(deep_folder), [small], [2], told=told.append)
    assert told == [f"{stage} at 64x64, 2 steps, batch 2" for stage in ("text_encoder", "denoise", "decode")]


def test_a_config_that_builds_nothing_is_named(deep_folder: Path) -> None:
    path = deep_folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": "many"}))
    with pytest.raises(ModelError, match=r"transformer .QwenImageTransformer2DModel. cannot be built from its config"):
        hollow_model.hollow_rehearsal(str(deep_folder), dtypes(deep_folder))


def test_a_rehearsal_comes_back_from_json_as_it_was(deep_folder: Path) -> None:
    found = rehearse.rehearse(str(deep_folder), dtypes(deep_folder), [shape("qwen_image", 64, 64)], [1, 2])
    assert cache.from_json(json.loads(json.dumps(cache.to_json(found)))) == found


GIB = 2**30


@pytest.fixture(scope="module")
def qwen_image() -> dict[tuple[str, int], StageProfile]:
    """Qwen-Image at full size, 1024x1024, 60 tokens of text: profiles by stage and batch."""
    known = known_models()["qwen/qwen-image"]
    job = playing.job_of(ShapeKey(1024, 1024, None, None, 2, 4.0, None, None, None, ()), rehearse.PROMPT)
    with small_collections():
        run = hollow_model.hollow_rehearsal(str(known.folder), known.stored, tokens=94)
        profiles = [profile for batch in (1, 2, 4) for profile in playing.play(run, job, batch)]
    sizes = {name: (run.parameters[name], run.weights[name]) for name in run.components}
    assert sizes == {
        "text_encoder": (8_292_166_656, 16_584_333_984), "transformer": (20_430_401_088, 40_860_802_176), "vae": (126_892_531, 253_785_062),
    }  # fmt: skip
    return {(profile.stage, profile.batch): profile for profile in profiles}


# Measured with torch 2.13.0 and diffusers 0.42.1: GiB of activations.
QWEN_IMAGE = {
    ("denoise", 1): 0.36, ("denoise", 2): 0.72, ("denoise", 4): 1.44, ("decode", 1): 3.38, ("decode", 2): 6.76, ("decode", 4): 13.51,
}  # fmt: skip


def test_qwen_image_at_full_size_needs_what_was_measured(qwen_image: dict[tuple[str, int], StageProfile]) -> None:
    assert {key: qwen_image[key].activation_bytes / GIB for key in QWEN_IMAGE} == pytest.approx(QWEN_IMAGE, rel=0.05)


@pytest.mark.parametrize("stage", ["text_encoder", "denoise", "decode"])
def test_two_batch_sizes_tell_the_third(qwen_image: dict[tuple[str, int], StageProfile], stage: str) -> None:
    one, two, four = (qwen_image[stage, batch].activation_bytes for batch in (1, 2, 4))
    assert Curve(((1, one), (2, two))).at(4) == pytest.approx(four, rel=0.01)
    assert rehearse._on_a_line([qwen_image[stage, 1]], [qwen_image[stage, 2]])


def test_a_third_batch_size_is_played_where_two_tell_too_little(deep_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = playing.job_of(shape("qwen_image", 64, 64), "a red circle")
    batches = {}
    for tolerance in (-1.0, 10.0):
        monkeypatch.setattr(rehearse, "_ON_A_LINE", tolerance)
        run = hollow_model.hollow_rehearsal(str(deep_folder), dtypes(deep_folder))
        batches[tolerance] = [{profile.batch for profile in played} for played in rehearse.play_batches(run, job, [4, 1, 2])]
    assert batches == {-1.0: [{1}, {2}, {4}], 10.0: [{1}, {2}]}


class _Masked(torch.nn.Module):
    """Attention under a mask that is written row by row, as the VAE of HunyuanVideo 1.5 does it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        rows = value.shape[1]
        mask = torch.full((rows, rows), float("-inf"), dtype=value.dtype, device=value.device)
        for row in range(rows):
            mask[row, : row + 1] = 0
        small = torch.zeros(4)
        small[1:3] = 2  # a real tensor keeps what is written into it
        query = self.project(value)[:, None]
        made = torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        return made * 2 if float(small.sum()) == 4 else made[:, :0]


@pytest.mark.parametrize("rows", [64, 1100])
def test_a_mask_written_row_by_row_has_the_peak_of_a_real_run(rows: int) -> None:
    scene, peaks, shapes = Scene(), [], []
    for real in (False, True):
        if real:
            module = hollow.count_calls(_Masked(), "masked", scene)
        else:
            with scene.fake:
                module = _Masked()
            hollow.enter(module, "masked", scene)
        inputs = torch.zeros(1, rows, 8)
        tracker = LiveBytes(module.parameters(), [inputs], fake=None if real else scene.fake)
        with scene.following(tracker):
            shapes.append(module(inputs).shape)
        peaks.append(tracker.peak)
    assert peaks[0] == peaks[1]
    assert shapes[0] == shapes[1] == (1, 1, rows, 8)


def test_no_score_matrix_is_made_at_4096_tokens(qwen_image: dict[tuple[str, int], StageProfile]) -> None:
    score_matrix = 24 * (4096 + 60) ** 2 * 2
    assert qwen_image["denoise", 1].activation_bytes < score_matrix


def test_flops_of_a_forward_are_those_counted_by_hand(qwen_image: dict[tuple[str, int], StageProfile]) -> None:
    """Two FLOPs a multiply-add; 4096 picture tokens of width 3072 in 24 heads, 60 blocks; attention over all tokens together."""
    width, text_width, picture = 3072, 3584, 4096

    def forward(text: int) -> int:
        both = picture + text
        projections = 2 * both * width * 3 * width + 2 * both * width * width  # q, k, v and out, for both streams
        feed_forward = 2 * both * width * 4 * width * 2
        modulation = 2 * 2 * width * 6 * width
        attention = 2 * 2 * both * both * width
        block = projections + feed_forward + modulation + attention
        time = 2 * (256 * width + width * width)
        ends = 2 * picture * 64 * width * 2 + 2 * text * text_width * width + time + 2 * width * 2 * width
        return 60 * block + ends

    profile = qwen_image["denoise", 1]
    assert profile.calls == (("transformer", 4),)
    assert profile.flops == 2 * (forward(60) + forward(60))
