"""Component names, their groups, and the lists in which a user names them.

Knows names only: no modes of a plan, no devices, no sizes. Every list is a set in effect: the order of its items never matters.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batchgen.errors import UsageError

GROUPS = ("dit", "text_encoder", "image_encoder", "vae")
HELPERS_OF_DIT = frozenset({"connectors", "dual_tower_bridge", "vision_language_encoder"})

_MEMBERS: Mapping[str, frozenset[str]] = {
    "dit": frozenset({"transformer", "unet", "prior", "video_dit", "audio_dit", "unconditional_transformer"}),
    "image_encoder": frozenset({"image_encoder"}),
    "vae": frozenset(
        {
            "vae", "video_vae", "audio_vae", "vqvae", "movq", "vocoder", "spatial_upsampler", "latent_upscaler",
            "condition_image_encoder", "sound_tokenizer",
        }
    ),
}  # fmt: skip
# What the CPU selector and the CPU flag of a group take besides its members.
_CPU_ALSO: Mapping[str, frozenset[str]] = {"dit": HELPERS_OF_DIT, "image_encoder": frozenset({"condition_image_encoder"})}
# Streaming pays only for these of the vae group; the others have too few blocks to stream.
_STREAMED_VAE = frozenset({"vae", "video_vae", "condition_image_encoder"})
_STREAMED_BY_DEFAULT = ("text_encoder", "image_encoder", "vae")


def normal(name: str) -> str:
    """A name as lists compare it: trimmed, lower case, `_` for `-`."""
    return name.strip().lower().replace("-", "_")


def base_name(name: str) -> str:
    """The normal name without one trailing `_<digits>`: `transformer_2` is a `transformer`."""
    return re.sub(r"_\d+$", "", normal(name))


def in_group(name: str, group: str) -> bool:
    """Whether a component is a member of a group, helpers left out."""
    base = base_name(name)
    if group == "text_encoder":
        return base.startswith("text_encoder") or base.endswith("text_encoder")
    return base in _MEMBERS[group]


def group_of(name: str) -> str | None:
    """The first group, in the table's order, that a component is a member of."""
    return next((group for group in GROUPS if in_group(name, group)), None)


def is_dit(name: str) -> bool:
    return in_group(name, "dit")


def is_dit_helper(name: str) -> bool:
    """Parts that work beside the dit and follow it on and off the device."""
    return base_name(name) in HELPERS_OF_DIT


def cpu_takes(group: str, name: str) -> bool:
    """Whether the CPU selector and the CPU flag of `group` take this component."""
    return in_group(name, group) or base_name(name) in _CPU_ALSO.get(group, ())


def layerwise_takes(group: str, name: str) -> bool:
    """Whether the layerwise selector's `group` takes this component."""
    return in_group(name, group) and (group != "vae" or base_name(name) in _STREAMED_VAE)


def streams_by_default(name: str) -> bool:
    """Whether the layerwise selector's `default` takes this component."""
    return any(layerwise_takes(group, name) for group in _STREAMED_BY_DEFAULT)


def items(text: str | None) -> tuple[str, ...]:
    """The items of a comma-separated list: normal names, blanks and repeats dropped, order kept. None or blank: none."""
    return tuple(dict.fromkeys(word for word in map(normal, (text or "").split(",")) if word))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`; None without choices."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.0)
    return found[0] if found else None


def unknown_name(option: str, word: str, components: Sequence[str], words: Sequence[str]) -> UsageError:
    """The error for a name that is neither a component of the model, nor a group, nor one of the list's own words."""
    choices = (*components, *(group for group in GROUPS if group not in components), *words)
    return UsageError(
        f"{option}: {word!r} is neither a component of this model nor a group. Did you mean {nearest(word, choices)!r}?",
        option=option,
        hint=f"The model has {', '.join(components)}. Groups: {', '.join(GROUPS)}. Also: {', '.join(words)}.",
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """One list as given, checked against the model's names. `items` empty: as if the option were not there."""

    option: str
    items: tuple[str, ...]

    @property
    def given(self) -> bool:
        return bool(self.items)

    @property
    def is_none(self) -> bool:
        return self.items == ("none",)


def parse(option: str, text: str | None, components: Sequence[str], words: Sequence[str]) -> Selection:
    """A checked list. `words` are the words it knows besides names and groups. Raises UsageError."""
    names = items(text)
    known = {*map(normal, components), *GROUPS, *words}
    for word in names:
        if word not in known:
            raise unknown_name(option, word, components, words)
    if "none" in names and len(names) > 1:
        others = ", ".join(name for name in names if name != "none")
        raise UsageError(f"{option}: 'none' stands alone, but {others} came with it", option=option, hint="Leave out one or the other.")
    return Selection(option, names)


def cpu_selection(text: str | None, components: Sequence[str]) -> Selection:
    return parse("--cpu-offload-components", text, components, ("all", "none"))


def layerwise_selection(text: str | None, components: Sequence[str]) -> Selection:
    return parse("--layerwise-offload-components", text, components, ("all", "default", "none"))


def cpu_match(selection: Selection, name: str) -> str | None:
    """The item of a CPU list that takes this component, the most exact first; None if none does."""
    return _match(selection, name, [group for group in GROUPS if cpu_takes(group, name)], ("all", "none"))


def layerwise_match(selection: Selection, name: str) -> str | None:
    """The item of a layerwise list that takes this component, the most exact first; None if none does."""
    words = ("default", "all") if streams_by_default(name) else ("all",)
    return _match(selection, name, [group for group in GROUPS if layerwise_takes(group, name)], words)


def _match(selection: Selection, name: str, groups: Sequence[str], words: Sequence[str]) -> str | None:
    return next((item for item in (normal(name), *groups, *words) if item in selection.items), None)


def residency_items(text: str | None, components: Sequence[str], modes: Sequence[str]) -> dict[str, str]:
    """`--component-residency` as normal name → mode; a repeated name takes its last mode. Raises UsageError."""
    option = "--component-residency"
    chosen: dict[str, str] = {}
    known = {*map(normal, components), *GROUPS, "all"}
    for item in (part.strip() for part in (text or "").split(",")):
        if not item:
            continue
        name, equals, mode = (part.strip() for part in item.partition("="))
        if not equals or not name or not mode:
            raise UsageError(
                f"{option}: {item!r} is not NAME=MODE",
                option=option,
                hint=f"Write it like {components[0] if components else 'vae'}=component-offload. Modes: {', '.join(modes)}.",
            )
        if normal(name) not in known:
            raise unknown_name(option, normal(name), components, ("all",))
        wanted = mode.lower().replace("_", "-")
        if wanted not in modes:
            raise UsageError(
                f"{option}: {mode!r} is no mode for {name}. Did you mean {nearest(wanted, modes)!r}?",
                option=option,
                hint="Sharding is asked for with --fsdp." if wanted == "fsdp" else f"Modes: {', '.join(modes)}.",
            )
        chosen[normal(name)] = wanted
    return chosen


def residency_match(chosen: Mapping[str, str], name: str) -> str | None:
    """The key of `--component-residency` that binds this component: exact name, else its group, else `all`."""
    return next((key for key in (normal(name), *(g for g in GROUPS if in_group(name, g)), "all") if key in chosen), None)
