"""The built-in text-to-image model and its demonstration manifest, shipped inside the package.

The model is an ordinary diffusers folder of the Z-Image classes, small enough for any CPU: it paints one shape (circle,
square, triangle, star, ring, cross) of one of ten colours, small or large, in one of five places, on a plain background,
as the prompt says. Its defaults (size, steps, guidance) are in configs/models/builtin.toml. tools/builtin/ in the repository
trains and judges it. This package imports no other part of batchgen.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The model's diffusers folder (the one that holds model_index.json).

    Raises FileNotFoundError where the package was installed without its data.
    """
    return _data("model/model_index.json").parent


def demo_manifest(*, with_failure: bool = False) -> Path:
    """The manifest that `batchgen demo` renders; `with_failure`: the same and one row more, which cannot be rendered.

    That row asks for so much guidance that fp32 cannot hold the latents.

    Raises FileNotFoundError where the package was installed without its data.
    """
    return _data("demo-with-failure.csv" if with_failure else "demo.csv")


def _data(name: str) -> Path:
    path = Path(__file__).parent / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: this installation of batchgen lacks its data files; install it again")
    return path
