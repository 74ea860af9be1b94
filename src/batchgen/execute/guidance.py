"""What a job's guidance means for a model, and the guider objects that carry it out.

A model's ordinary pipeline says it in its call signature; the stages say it in their guiders' configs. The rules here join the
two without knowing any family: a guider's setting takes the value the ordinary call has for the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.guiders.guider_utils import GuiderOutput

from batchgen.jobs import Job


class RowGuidance(ClassifierFreeGuidance):
    """Classifier-free guidance with a scale of its own for every row of the batch.

    `scales` [B], one a row. The stock guider compares its one scale with a number, so a tensor cannot be given to it.
    """

    def __init__(self, scales: Sequence[float], original_formulation: bool) -> None:
        super().__init__(guidance_scale=float(max(scales)), use_original_formulation=original_formulation)
        self.scales = torch.tensor(scales, dtype=torch.float32)

    def _is_cfg_enabled(self) -> bool:
        return True

    def forward(self, pred_cond: torch.Tensor, pred_uncond: torch.Tensor | None = None) -> GuiderOutput:
        """Both predictions [B, ...]; the result has their shape and dtype."""
        assert pred_uncond is not None
        # in float32, as a plain number would be multiplied: a scale rounded to bfloat16 is off by up to 0.4 %
        scale = self.scales.to(pred_cond.device).view(-1, *[1] * (pred_cond.dim() - 1))
        shift = (scale * (pred_cond - pred_uncond).float()).to(pred_cond.dtype)
        base = pred_cond if self.use_original_formulation else pred_uncond
        return GuiderOutput(pred=base + shift, pred_cond=pred_cond, pred_uncond=pred_uncond)


@dataclass(frozen=True, slots=True)
class JobGuidance:
    """A job's guidance, resolved. `on`: two branches run, so the negative prompt counts. `scale` None: the guider's own.

    `told`: the scale in effect, as the picture's settings say it; None where the model has none.
    """

    on: bool
    scale: float | None
    told: float | None = None


class GuidanceRules:
    """Resolves jobs' guidance for one model.

    `call`: parameter -> default of the ordinary pipeline's call; `guiders`: the denoise stage's own guiders by name;
    `embeds_scale`: the denoise stage takes the scale as an argument (distilled models).
    """

    def __init__(self, call: Mapping[str, Any], guiders: Mapping[str, Any], embeds_scale: bool, extra: Mapping[str, Any]) -> None:
        self.call = call
        self.embeds_scale = embeds_scale
        self.guiders = {name: guider.new(**self._settings(name, guider.config, extra)) for name, guider in guiders.items()}
        # guiders with a scale of their own in the call (sound beside pictures) do not follow the job's
        self.independent = {name for name in guiders if name != "guider" and self._own_scale(name) is not None}
        # pipelines with this parameter run the second branch only where a negative prompt was given
        self.needs_negative = "true_cfg_scale" in call and "guider" in guiders

    def _settings(self, name: str, config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for key in config:
            value = self._call_value(name, key)
            if not key.startswith("_") and value is not None and not isinstance(value, torch.Tensor):
                found[key] = value
        settings = {**found, **{key: value for key, value in extra.items() if key in config}}
        if "enabled" in config:
            settings["enabled"] = True
        return settings

    def _call_value(self, guider: str, key: str) -> Any:
        """`audio_guider` takes the call's audio_KEY before KEY, `guider_2` takes KEY_2 before KEY."""
        prefix, _, rest = guider.partition("guider")
        for candidate in (f"{prefix}{key}{rest}", key):
            if self.call.get(candidate) is not None:
                return self.call[candidate]
        return self.call.get("true_cfg_scale") if key == "guidance_scale" else None

    def _own_scale(self, guider: str) -> Any:
        prefix, _, rest = guider.partition("guider")
        return self.call.get(f"{prefix}guidance_scale{rest}")

    @property
    def has_guider(self) -> bool:
        return bool(self.guiders)

    @property
    def neutral(self) -> float:
        """The scale at which the negative branch has no say."""
        return 0.0 if self.guiders["guider"].config.get("use_original_formulation") else 1.0

    @property
    def mixes_rows(self) -> bool:
        """Whether rows of different scales can share a batch: every guider is the stock one, without a rescale."""
        return self.has_guider and all(
            type(guider) is ClassifierFreeGuidance and not guider.config.get("guidance_rescale") for guider in self.guiders.values()
        )

    def beyond_stages(self, job: Job) -> bool:
        """Whether only the ordinary call can do what the job asks: a second branch beside an embedded scale."""
        return job.true_cfg_scale is not None and not self.has_guider and self.embeds_scale and "true_cfg_scale" in self.call

    def of(self, job: Job) -> JobGuidance:
        asked = job.guidance
        if self.has_guider and job.true_cfg_scale is not None:
            asked = job.true_cfg_scale
        if not self.has_guider:
            scale = asked if asked is not None else self.call.get("guidance_scale")
            return JobGuidance(False, scale, scale if scale is not None else self.call.get("true_cfg_scale"))
        scale = float(self.guiders["guider"].config["guidance_scale"] if asked is None else asked)
        if scale <= self.neutral or (self.needs_negative and job.negative_prompt is None):
            return JobGuidance(bool(self.independent), self.neutral, self.neutral)
        return JobGuidance(True, None if asked is None else scale, scale)

    def guiders_for(self, rows: Sequence[JobGuidance]) -> dict[str, Any]:
        """Fresh guiders for a batch. Rows of one batch are all on or all off; off is the neutral scale, not `disable()`."""
        if not self.has_guider:
            return {}
        made = {}
        for name, guider in self.guiders.items():
            own = float(guider.config["guidance_scale"])
            scales = [own if row.scale is None or name in self.independent else row.scale for row in rows]
            if len(set(scales)) == 1:
                made[name] = guider.new(guidance_scale=scales[0]) if scales[0] != own else guider.new()
            else:
                made[name] = RowGuidance(scales, bool(guider.config.get("use_original_formulation")))
        return made

    def text_guider(self, guider: Any, *, negatives: bool) -> Any:
        """A text stage's guider: on, so that negatives are encoded, or off. Its scale is only compared with the neutral one."""
        settings: dict[str, Any] = {"guidance_scale": 7.0} if negatives else {}
        return guider.new(enabled=negatives, **settings)


def is_guider_name(name: str) -> bool:
    """`guider`, `guider_2`, `audio_guider`."""
    return re.fullmatch(r"(\w+_)?guider(_\d+)?", name) is not None
