"""Clips on disk: frames, frame rate, sound and settings in; one whole file (or one folder of frames) out.

The only module that loads the video library. Frames are encoded one at a time, so a long clip takes no second copy in memory.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import av
import numpy as np
import numpy.typing as npt

from batchgen.errors import UsageError
from batchgen.jobs import FPS_HIGH, FPS_LOW
from batchgen.outputs.files import atomic_write, disk_errors, make_folders, measure, place, sync_folder, temp_path
from batchgen.outputs.image import Pixels, as_image, embedded
from batchgen.outputs.metadata import RECORD, exif_for
from batchgen.outputs.webp import write_animation

Sound = tuple[npt.NDArray[np.float32], int]  # samples [channels, samples] in -1..1, and their rate in Hz

EXTENSIONS = {"mp4": ".mp4", "webp": ".webp", "png": ""}
_CRF = "17"  # of x264: no difference to be seen
_AUDIO_FRAME = 1024
SOUND_FILE = "sound.wav"  # beside the frames of a folder


def write_video(
    frames: Pixels | Iterable[Pixels],
    path: Path,
    settings: Mapping[str, str],
    *,
    fps: float,
    video_format: str = "mp4",
    overwrite: bool = False,
    sound: Sound | None = None,
) -> tuple[int, str]:
    """Writes a clip and returns its size in bytes and SHA-256 (hex; of a folder: see `files.measure`).

    `frames` are uint8 [H, W, 3], all of one size: an array [frames, H, W, 3] or a stream. MP4 is H.264 in yuv420p with its index in
    front, exactly `fps` and exactly as many frames; its sides must be even (UsageError). `sound` is a track of the MP4, and a
    `sound.wav` beside the frames of a folder; a WebP has no place for it (UsageError). Raises ValueError for other pixels, an
    unknown format or no frames, FileExistsError where the name is taken, DiskError where the disk gives out.
    """
    if video_format not in EXTENSIONS:
        raise ValueError(f"unknown clip format {video_format!r} (known: {', '.join(EXTENSIONS)})")
    if not FPS_LOW <= fps <= FPS_HIGH:
        raise ValueError(f"fps must be {FPS_LOW:g} ... {FPS_HIGH:g}, got {fps}")
    if sound is not None and video_format == "webp":
        raise UsageError("a clip kept as webp holds no sound", option="--video-format", hint="Use --video-format mp4 or png.")
    stream = _checked(frames)
    if video_format == "mp4":
        return atomic_write(path, lambda handle: _write_mp4(handle, stream, settings, fps, sound), overwrite=overwrite)
    if video_format == "webp":
        exif = exif_for(settings) if RECORD in settings else None
        return atomic_write(path, lambda handle: write_animation(handle, stream, fps=fps, exif=exif), overwrite=overwrite)
    return _write_frames(path, stream, settings, sound, overwrite)


def _checked(frames: Pixels | Iterable[Pixels]) -> Iterator[Pixels]:
    shape: tuple[int, ...] | None = None
    for frame in frames:
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or 0 in frame.shape:
            raise ValueError(f"frames must be uint8 [H, W, 3], got {frame.dtype} {list(frame.shape)}")
        if shape is not None and frame.shape != shape:
            raise ValueError(f"frames of one clip must be of one size, got {list(shape)} and {list(frame.shape)}")
        shape = frame.shape
        yield frame
    if shape is None:
        raise ValueError("a clip needs at least one frame")


def refuse_odd(width: int, height: int) -> None:
    """Raises UsageError where H.264 in yuv420p, which halves the colour planes, cannot hold the size."""
    if width % 2 or height % 2:
        raise UsageError(
            f"an MP4 cannot be {width}x{height}: both sides must be even",
            option="--video-format", hint=f"Use {width + width % 2}x{height + height % 2}, or --video-format webp or png.",
        )


def _rate(fps: float) -> Fraction:
    """The frame rate as the fraction it stands for: 29.97 is 30000/1001."""
    for base in (24, 30, 48, 60, 120):
        if abs(fps - base * 1000 / 1001) < 0.005:
            return Fraction(base * 1000, 1001)
    return Fraction(fps).limit_denominator(1000)


def _ticks(rate: Fraction) -> int:
    """Ticks a second, a thousand at least, of a clock in which every frame begins and ends at a whole tick."""
    return rate.numerator * max(1, -(-1000 // rate.numerator))


def _write_mp4(handle: BinaryIO, frames: Iterator[Pixels], settings: Mapping[str, str], fps: float, sound: Sound | None) -> None:
    first = next(frames)
    height, width = first.shape[:2]
    refuse_odd(width, height)
    rate = _rate(fps)
    # In the file's own clock, thousandths of a second, a clip of few fast frames would end before its last ones.
    clock = {"movie_timescale": str(_ticks(rate))}
    # By name: faststart moves the index to the front by opening the file a second time.
    with av.open(handle.name, "w", format="mp4", options={"movflags": "faststart", **clock}) as container:
        if RECORD in settings:
            container.metadata.update({"comment": settings[RECORD], "title": settings.get("prompt", "")[:200]})
        video = container.add_stream("libx264", rate=rate, options={"crf": _CRF, "preset": "medium"})
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        video.codec_context.time_base = 1 / rate
        track = _sound_track(container, sound)
        for number, pixels in enumerate(_chain(first, frames)):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if track is not None and sound is not None:
            _encode_sound(container, track, sound)


def _chain(first: Pixels, rest: Iterator[Pixels]) -> Iterator[Pixels]:
    yield first
    yield from rest


def _sound_track(container: Any, sound: Sound | None) -> Any:
    if sound is None:
        return None
    samples, rate = _checked_sound(sound)
    track = container.add_stream("aac", rate=rate)
    track.layout = "mono" if samples.shape[0] == 1 else "stereo"
    return track


def _checked_sound(sound: Sound) -> Sound:
    samples, _ = sound
    if samples.ndim != 2 or samples.shape[0] not in (1, 2):
        raise ValueError(f"sound must be [1 or 2 channels, samples], got {list(samples.shape)}")
    return sound


def _encode_sound(container: Any, track: Any, sound: Sound) -> None:
    samples, rate = sound
    layout = "mono" if samples.shape[0] == 1 else "stereo"
    for start in range(0, samples.shape[1], _AUDIO_FRAME):
        part = np.ascontiguousarray(samples[:, start : start + _AUDIO_FRAME], dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(np.clip(part, -1, 1), format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
        container.mux(track.encode(frame))
    container.mux(track.encode(None))


def _write_frames(
    path: Path, frames: Iterator[Pixels], settings: Mapping[str, str], sound: Sound | None, overwrite: bool
) -> tuple[int, str]:
    """A folder of numbered PNGs, each with the clip's settings, and its sound, that appears whole under its name."""
    with disk_errors(path):
        make_folders(path.parent)
        temp = temp_path(path.parent)
        temp.mkdir()
        try:
            for number, pixels in enumerate(frames):
                arguments = embedded(settings, "png")

                def save(handle: BinaryIO, pixels: Pixels = pixels, arguments: dict[str, Any] = arguments) -> None:
                    as_image(pixels).save(handle, format="PNG", compress_level=4, **arguments)

                atomic_write(temp / f"{number:05d}.png", save)
            if sound is not None:
                atomic_write(temp / SOUND_FILE, _as_wav(sound))
            sync_folder(temp)
            measured = measure(temp)
            place(temp, path, overwrite=overwrite)
        finally:
            _remove(temp)
    return measured


def _as_wav(sound: Sound) -> bytes:
    """16-bit PCM."""
    samples, rate = _checked_sound(sound)
    whole = io.BytesIO()
    with wave.open(whole, "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples.T, -1, 1) * 32767).round().astype("<i2").tobytes())
    return whole.getvalue()


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for frame in folder.iterdir():
            frame.unlink()
        folder.rmdir()
