"""The table of model families that are tested, and the page made from it. Imports no model library."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.execute.families import FAMILIES


@dataclass(frozen=True)
class Case:
    """A family: how it runs, and what its products are held against. Read by test_families.py and by docs/models.md."""

    family: str  # builder in tests/tiny.py
    name: str  # as people call it
    pipeline: str
    exact: bool  # at batch 1 bit for bit with the ordinary pipeline; else within 1e-5 (its two branches run as one batch there)
    shares: bool  # rows that differ in guidance share a batch
    road: str = "stages"
    frames: int | None = None
    image: bool = False  # takes a picture, always
    last_image: bool = False  # and one for the last frame
    pictures: str = ""  # picture inputs, for the page
    note: str = ""


CASES = (
    Case("qwen_image", "Qwen-Image", "QwenImagePipeline", True, True, pictures="image-to-image \u2020, inpaint \u2020",
         note="guidance counts where a negative prompt is given, as in the ordinary pipeline"),
    Case("z_image", "Z-Image", "ZImagePipeline", False, True, pictures="image-to-image, inpaint \u2020",
         note="its formula counts from 0: guidance 0 is off, 1 is not"),
    Case("flux", "FLUX.1", "FluxPipeline", True, False, pictures="image-to-image, inpaint \u2020",
         note="guidance is embedded; rows with `true_cfg_scale` take the ordinary call"),
    Case("flux_kontext", "FLUX.1 Kontext", "FluxKontextPipeline", True, False, pictures="edit, inpaint \u2020",
         note="keeps the size asked for, where its ordinary call brings every size to one megapixel"),
    Case("flux2", "FLUX.2 dev", "Flux2Pipeline", True, False, pictures="edit, several pictures",
         note="needs `batchgen[edit]` for its processor; takes no negative prompt"),
    Case("flux2_klein", "FLUX.2 klein", "Flux2KleinPipeline", True, True, pictures="edit, several pictures; inpaint \u2020", note="takes no negative prompt"),
    Case("sd3", "Stable Diffusion 3", "StableDiffusion3Pipeline", False, True, pictures="image-to-image"),
    Case("sdxl", "Stable Diffusion XL", "StableDiffusionXLPipeline", False, True, pictures="image-to-image, inpaint \u2020"),
    Case("wan21", "Wan 2.1 text-to-video", "WanPipeline", True, True, frames=5),
    Case("wan21_i2v", "Wan 2.1 image-to-video", "WanImageToVideoPipeline", True, True, frames=5, image=True, pictures="image-to-video"),
    Case("wan21_flf2v", "Wan 2.1 first and last frame", "WanImageToVideoPipeline", True, True, frames=5, image=True, last_image=True,
         pictures="image-to-video with a last frame"),
    Case("wan22", "Wan 2.2 text-to-video", "WanPipeline", True, True, frames=5, note="two experts, one swap a batch"),
    Case("wan22_i2v", "Wan 2.2 image-to-video", "WanImageToVideoPipeline", True, True, frames=5, image=True,
         pictures="image-to-video, with a last frame \u2020", note="two experts, one swap a batch"),
    Case("ltx", "LTX-Video", "LTXPipeline", False, True, frames=9, pictures="image-to-video"),
    Case("ltx2", "LTX-2", "LTX2Pipeline", False, False, frames=9, pictures="image-to-video", note="with a sound track"),
    Case("hunyuan_video15", "HunyuanVideo 1.5", "HunyuanVideo15Pipeline", True, True, frames=5,
         note="its VAE decodes one clip at a time; guidance comes from the folder's guider"),
    Case("hunyuan_video15_i2v", "HunyuanVideo 1.5 image-to-video", "HunyuanVideo15ImageToVideoPipeline", True, False, "pipeline", frames=5,
         image=True, pictures="image-to-video",
         note="a clip has its picture's shape: leave width and height out; its folder's guider is the default"),
    Case("pixart_sigma", "PixArt-Sigma", "PixArtSigmaPipeline", True, False, "pipeline"),
    Case("lumina2", "Lumina 2", "Lumina2Pipeline", True, False, "pipeline"),
    Case("wan22_ti2v", "Wan 2.2 TI2V-5B", "WanPipeline", True, False, "pipeline", frames=5,
         note="no blocks know its VAE and timesteps"),
)

EDIT = Case("qwen_image_edit", "Qwen-Image-Edit", "QwenImageEditPipeline", True, True, image=True, pictures="edit",
            note="needs `batchgen[edit]`; its encoders take one row at a time")
EDIT_PLUS = Case("qwen_image_edit_plus", "Qwen-Image-Edit-Plus", "QwenImageEditPlusPipeline", True, True, image=True,
                 pictures="edit, several pictures",
                 note="needs `batchgen[edit]`; its encoders take one row at a time")

HEAD = """# Models

Made from the table that `tests/integration/test_families.py` runs (`python tools/docs/models_page.py`); do not edit.

Any diffusers pipeline runs. The ones in the first table are split into stages by diffusers' modular blocks, so that a window of jobs is
encoded, denoised and decoded as a whole and weights move once a window. All others, some of which are in the second table, run through
their own call as one stage, with the same batches, placements, seeds and recovery.

"Equal" means the float pictures at batch 1 in float32 are the ordinary pipeline's bit for bit; "1e-5" that they are within 1e-5, because
that pipeline runs its two guidance branches as one batch of twice the size. In larger batches all are within 1e-5: kernels round
differently. Jobs with a picture input take the same stages, or, where marked \u2020, the library's sister pipeline
(`...Img2ImgPipeline`, `...InpaintPipeline`) as one stage. In bfloat16 the stages and the ordinary pipeline differ more (some round the timestep); nothing is promised there.

Clips are MP4 (H.264, yuv420p, the index in front), animated WebP or a folder of PNG frames (`--video-format`), with exactly the size, frames and
rate of `tables/jobs.csv`. A sound track goes into the MP4, or beside the frames as `sound.wav`; a WebP holds none, and is flagged `no sound`.
A WebP counts whole milliseconds: at 16 frames a second its frames last 62 or 63, each beginning within half a millisecond of its time, so that
the clip keeps its length.
Frames are written one by one: a clip is held in memory once. Of two denoisers that share a schedule, one that no row's steps reach is not loaded.
"""


def models_page() -> str:
    """docs/models.md, from the tables."""
    split = {family.pipeline for family in FAMILIES}
    lines = [HEAD, "## In stages", "", "| model | pipeline class | makes | picture inputs | rows of different guidance | batch 1 | |",
             "|---|---|---|---|---|---|---|"]
    lines += [_row(case) for case in sorted((*CASES, EDIT, EDIT_PLUS), key=lambda case: case.name) if case.road == "stages"]
    lines += ["", "## Through their own call", "", "| model | pipeline class | makes | picture inputs | rows of different guidance | batch 1 | |",
              "|---|---|---|---|---|---|---|"]
    lines += [_row(case) for case in CASES if case.road == "pipeline"]
    known = ", ".join(f"`{name}`" for name in sorted(split))
    lines += ["", f"Pipeline classes that are split into stages: {known}.", ""]
    return "\n".join(lines)


def _row(case: Case) -> str:
    made = "clips" if case.frames else "pictures"
    guidance = "share a batch" if case.shares else "are grouped"
    cells = (case.name, f"`{case.pipeline}`", made, case.pictures or "none", guidance, "equal" if case.exact else "1e-5", case.note)
    return "| " + " | ".join(cells) + " |"
