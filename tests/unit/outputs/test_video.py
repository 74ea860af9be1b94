"""Clips are exactly as long, fast and large as asked, whole, and say how they were made."""

from __future__ import annotations

import gc
import struct
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from batchgen.errors import UsageError
from batchgen.jobs import Job
from batchgen.outputs import video
from batchgen.outputs.files import measure
from batchgen.outputs.metadata import read_settings, settings_for
from batchgen.outputs.video import write_video
from batchgen.outputs.whole import condition, judge

KEY = "k" * 32
FRAMES = np.zeros((9, 32, 48, 3), np.uint8) + np.arange(9, dtype=np.uint8)[:, None, None, None] * 25


def texts(prompt: str = "a cat 猫 walks", **fields: Any) -> dict[str, str]:
    job = Job(KEY, 0, 2, 0, "cat", prompt, None, 7, "row", "x.mp4", num_frames=9, fps=8.0, **fields)
    return settings_for(job, {"model": "m", "revision": "r"}, 1)


RATES = {
    "whole": (16.0, Fraction(16)),
    "fraction": (7.5, Fraction(15, 2)),
    "film on video": (23.976, Fraction(24000, 1001)),
    "slow": (1.0, Fraction(1)),
    "the slowest": (0.1, Fraction(1, 10)),
    "the fastest": (1000.0, Fraction(1000)),
    "fast and odd": (997.3, Fraction(9973, 10)),
}


@pytest.mark.parametrize(("fps", "rate"), RATES.values(), ids=RATES.keys())
def test_an_mp4_has_exactly_its_frames_size_and_rate(tmp_path: Path, fps: float, rate: Fraction) -> None:
    path = tmp_path / "x.mp4"
    assert write_video(FRAMES, path, texts(), fps=fps) == measure(path)
    with av.open(str(path)) as clip:
        stream = clip.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == rate
        pictures = [frame.to_ndarray(format="rgb24") for frame in clip.decode(stream)]
    assert np.asarray(pictures).shape == FRAMES.shape
    assert np.abs(np.asarray(pictures).astype(int) - FRAMES).max() <= 4
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]


@pytest.mark.parametrize("fps", [0.1, 923.1, 997.3, 1000.0])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_few_fast_frames_are_all_decoded_each_at_its_time(tmp_path: Path, fps: float, count: int) -> None:
    # as large as this, x264 reorders even three frames, and the index says from when on to show them
    frames = np.zeros((count, 128, 160, 3), np.uint8) + np.arange(count, dtype=np.uint8)[:, None, None, None] * 50
    write_video(frames, tmp_path / "x.mp4", texts(), fps=fps)
    with av.open(str(tmp_path / "x.mp4")) as clip:
        times = [float(frame.pts * frame.time_base) for frame in clip.decode(video=0)]
    assert times == pytest.approx([number / fps for number in range(count)])


@pytest.mark.parametrize("fps", [2000, 12_800, 20_000, 100_000])
def test_the_clock_of_an_mp4_ends_no_clip_early_at_any_rate(tmp_path: Path, fps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "FPS_HIGH", 1e9)  # beyond what rows may ask for, where a clock of milliseconds loses frames
    frames = np.zeros((3, 128, 160, 3), np.uint8) + np.arange(3, dtype=np.uint8)[:, None, None, None] * 50
    write_video(frames, tmp_path / "x.mp4", texts(), fps=fps)
    with av.open(str(tmp_path / "x.mp4")) as clip:
        assert sum(1 for _ in clip.decode(video=0)) == 3


@pytest.mark.parametrize("kind", ["mp4", "webp", "png"])
@pytest.mark.parametrize("fps", [0.0, -1.0, 0.0001, 1000.1, float("nan")])
def test_rates_that_no_clip_can_hold_are_refused(tmp_path: Path, fps: float, kind: str) -> None:
    with pytest.raises(ValueError, match=r"0\.1 \.\.\. 1000"):
        write_video(FRAMES, tmp_path / "x", texts(), fps=fps, video_format=kind)
    assert not list(tmp_path.iterdir())


def test_the_index_stands_in_front(tmp_path: Path) -> None:
    write_video(FRAMES, tmp_path / "x.mp4", texts(), fps=8)
    data = (tmp_path / "x.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


def test_frames_may_come_as_a_stream(tmp_path: Path) -> None:
    write_video(iter(FRAMES), tmp_path / "x.mp4", texts(), fps=8)
    with av.open(str(tmp_path / "x.mp4")) as clip:
        assert sum(1 for _ in clip.decode(video=0)) == 9


@pytest.mark.parametrize("kind", ["mp4", "webp", "png"])
def test_settings_are_inside_and_read_without_the_video_library(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" if kind == "png" else f"x.{kind}")
    write_video(FRAMES, path, texts(), fps=8, video_format=kind)
    read = read_settings(path)
    assert read is not None
    assert (read["key"], read["prompt"], read["seed"], read["num_frames"]) == (KEY, "a cat 猫 walks", 7, 9)
    assert judge(path, KEY)[0] == "ours"


def test_other_players_find_the_settings_as_comment_and_title(tmp_path: Path) -> None:
    write_video(FRAMES, tmp_path / "x.mp4", texts(), fps=8)
    with av.open(str(tmp_path / "x.mp4")) as clip:
        assert clip.metadata["title"] == "a cat 猫 walks"
        assert KEY in clip.metadata["comment"]


def test_a_prompt_of_a_megabyte_is_cut(tmp_path: Path) -> None:
    write_video(FRAMES, tmp_path / "x.mp4", texts("猫" * 400_000), fps=8)
    read = read_settings(tmp_path / "x.mp4")
    assert read is not None
    assert (read["key"], read["cut"]) == (KEY, {"prompt": 1_200_000})


@pytest.mark.parametrize("cut", [0, 10], ids=["whole", "cut"])
def test_settings_are_read_behind_a_box_whose_size_takes_64_bits(tmp_path: Path, cut: int) -> None:
    """So are the frames of a clip of 4 GiB written; its settings may stand behind them."""
    path = tmp_path / "x.mp4"
    write_video(FRAMES, path, texts(), fps=8)
    data = path.read_bytes()
    (first,) = struct.unpack(">I", data[:4])  # the box that says what the file is
    data = data[:first] + struct.pack(">I4sQ", 1, b"free", 20) + bytes(4) + data[first:]
    path.write_bytes(data[: len(data) - cut])
    read = read_settings(path)
    assert read is not None
    assert read["key"] == KEY
    assert condition(path) == ("damaged" if cut else "whole")


@pytest.mark.parametrize("part", [0.001, 0.3, 0.5, 0.99])
def test_a_cut_mp4_is_damaged(tmp_path: Path, part: float) -> None:
    path = tmp_path / "x.mp4"
    noise = np.random.default_rng(0).integers(0, 256, FRAMES.shape, dtype=np.uint8)
    write_video(noise, path, texts(), fps=8)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    assert condition(path) == "damaged"
    assert judge(path, KEY)[0] == "damaged"


@pytest.mark.parametrize(("height", "width"), [(31, 48), (32, 47), (31, 47)])
def test_odd_sizes_are_refused_in_mp4_and_kept_in_the_others(tmp_path: Path, height: int, width: int) -> None:
    frames = FRAMES[:, :height, :width]
    with pytest.raises(UsageError, match=f"{width}x{height}"):
        write_video(frames, tmp_path / "x.mp4", texts(), fps=8)
    assert not list(tmp_path.iterdir())
    write_video(frames, tmp_path / "x.webp", texts(), fps=8, video_format="webp")
    with Image.open(tmp_path / "x.webp") as clip:
        assert clip.size == (width, height)


def test_a_webp_clip_has_all_frames_and_their_times(tmp_path: Path) -> None:
    write_video(FRAMES, tmp_path / "x.webp", texts(), fps=8, video_format="webp")
    with Image.open(tmp_path / "x.webp") as clip:
        assert clip.n_frames == 9
        clip.load()
        assert clip.info["duration"] == 125


@pytest.mark.parametrize(("fps", "lasting"), [(16.0, {62, 63}), (23.976, {41, 42}), (997.3, {1, 2}), (1000.0, {1}), (0.1, {10_000})])
def test_each_frame_of_a_webp_begins_at_the_nearest_millisecond(tmp_path: Path, fps: float, lasting: set[int]) -> None:
    frames = np.repeat(FRAMES[:, :8, :8], 70, axis=0)  # 630: 997.3 frames a second need some for a second millisecond
    write_video(frames, tmp_path / "x.webp", texts(), fps=fps, video_format="webp")
    shown = []
    with Image.open(tmp_path / "x.webp") as clip:
        for number in range(clip.n_frames):
            clip.seek(number)
            clip.load()
            shown.append(clip.info["duration"])
    assert set(shown) == lasting
    ends = np.cumsum(shown)
    assert np.abs(ends - np.arange(1, len(frames) + 1) * 1000 / fps).max() <= 0.5


@pytest.mark.parametrize("kind", ["mp4", "webp", "png"])
def test_no_frame_waits_for_the_ones_after_it(tmp_path: Path, kind: str) -> None:
    most = 0

    def alive() -> int:
        # by type: asking some objects for their class makes them warn
        return sum(issubclass(type(thing), (Image.Image, av.VideoFrame)) for thing in gc.get_objects())

    def stream() -> Any:
        nonlocal most
        for frame in FRAMES:
            most = max(most, alive())
            yield frame

    gc.collect()
    before = alive()
    write_video(stream(), tmp_path / kind, texts(), fps=8, video_format=kind)
    assert most - before <= 2


def test_frames_in_a_folder_have_their_sound_beside_them(tmp_path: Path) -> None:
    samples = np.array([[0, 0.5, 1.5], [0, -0.5, -1]], np.float32)
    write_video(FRAMES, tmp_path / "x", texts(), fps=8, video_format="png", sound=(samples, 16_000))
    with wave.open(str(tmp_path / "x" / "sound.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (2, 16_000, 2)
        heard = np.frombuffer(file.readframes(3), "<i2").reshape(3, 2)
    assert heard.tolist() == [[0, 0], [16384, -16384], [32767, -32767]]
    assert judge(tmp_path / "x", KEY)[0] == "ours"
    (tmp_path / "x" / "sound.wav").write_bytes(b"RIFF")
    assert judge(tmp_path / "x", KEY)[0] == "damaged"


def test_a_folder_of_frames_holds_the_very_pixels(tmp_path: Path) -> None:
    measured = write_video(FRAMES, tmp_path / "x", texts(), fps=8, video_format="png")
    assert measured == measure(tmp_path / "x")
    names = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert names == [f"{number:05d}.png" for number in range(9)]
    for number, name in enumerate(names):
        with Image.open(tmp_path / "x" / name) as frame:
            assert np.array_equal(np.asarray(frame), FRAMES[number])
    (tmp_path / "x" / "00003.png").write_bytes(b"")
    assert judge(tmp_path / "x", KEY)[0] == "damaged"


@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_track_is_as_long_as_its_samples(tmp_path: Path, channels: int) -> None:
    rate = 16_000
    wave = np.sin(np.arange(rate) / 20, dtype=np.float32)[None].repeat(channels, 0)
    write_video(FRAMES, tmp_path / "x.mp4", texts(), fps=9, sound=(wave, rate))
    with av.open(str(tmp_path / "x.mp4")) as clip:
        track = clip.streams.audio[0]
        assert (track.codec_context.sample_rate, track.codec_context.channels) == (rate, channels)
        heard = np.concatenate([frame.to_ndarray() for frame in clip.decode(track)], axis=1)
    assert abs(heard.shape[1] - rate) <= 2048  # AAC fills its first and last frame
    assert 0.9 < np.abs(heard).max() < 1.1


def test_sound_without_a_place_for_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sound"):
        write_video(FRAMES, tmp_path / "x.webp", texts(), fps=8, video_format="webp", sound=(np.zeros((1, 9), np.float32), 8000))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "at least one"),
        ([FRAMES[0], FRAMES[1][:16]], "one size"),
        ([FRAMES[0].astype(np.float32)], "uint8"),
    ],
    ids=["none", "two sizes", "floats"],
)
def test_other_frames_are_refused_and_leave_nothing(tmp_path: Path, frames: Any, message: str) -> None:
    for kind in ("mp4", "webp", "png"):
        with pytest.raises((ValueError, StopIteration, RuntimeError), match=message):
            write_video(frames, tmp_path / kind, texts(), fps=8, video_format=kind)
    assert not list(tmp_path.iterdir())


def test_a_taken_name_is_kept(tmp_path: Path) -> None:
    for kind in ("mp4", "webp"):
        (tmp_path / kind).write_bytes(b"mine")
        with pytest.raises(FileExistsError):
            write_video(FRAMES, tmp_path / kind, texts(), fps=8, video_format=kind)
        assert (tmp_path / kind).read_bytes() == b"mine"
    (tmp_path / "png").mkdir()
    with pytest.raises(FileExistsError):
        write_video(FRAMES, tmp_path / "png", texts(), fps=8, video_format="png")
