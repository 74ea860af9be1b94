"""Rehearses a model at the shapes of a list: which roads they take, and how many batch sizes tell the others.

Built by hollow_model, played by playing; the road rehearsed is the road run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from batchgen.execute.arguments import block_names
from batchgen.execute.experts import idle_experts
from batchgen.execute.hollow_model import Rehearsal, hollow_rehearsal, on_road, staying_bytes, tile
from batchgen.execute.playing import job_of, play
from batchgen.execute.stages import DECODE, DENOISE, PIPELINE
from batchgen.inventory.prompt_limits import call_arguments
from batchgen.jobs import Job, ShapeKey
from batchgen.plan.records import Rehearsed, RehearsedComponent, StageProfile
from batchgen.rehearsal.calls import small_collections

# About as many tokens as a careful prompt has; a manifest's own longest prompt takes its place.
PROMPT = (
    "A wide photograph of a small wooden boat on a calm mountain lake at sunrise, mist over the water, tall pine trees along the shore, "
    "snow on the far peaks, soft golden light, a red blanket folded on the seat, fine detail, natural colours, quiet mood"
)
_PICTURE = ("image",)
# Peaks at two batch sizes this near to one line through nothing at no rows tell those of all others.
_ON_A_LINE = 0.02


def rehearse(
    path: str, dtypes: Mapping[str, str], shapes: Sequence[ShapeKey], batches: Sequence[int], *, prompt: str | None = None,
    tokens: int = 60, tiled: bool = False, trust_remote_code: bool = False, told: Callable[[str], None] | None = None,
    other_steps: Sequence[int | None] = (),
) -> Rehearsed:
    """Profiles of every stage at every shape, at as many of the batch sizes as tell the others. `tiled`: decodes in tiles as well.

    `other_steps`: step counts of the list's shapes that are not played. `told` hears of every stage before it is
    played: its name, shape and batch in one line.
    """
    with small_collections():
        rehearsal = hollow_rehearsal(path, dtypes, tokens=tokens, trust_remote_code=trust_remote_code, inputs=block_names(shapes[0].inputs))
        rehearsal.told = told
        stages = rehearsal.stages
        drawing = stages.named(PIPELINE if stages.family is None else DENOISE)
        rehearsal.idle = idle_experts(stages, drawing, (*(shape.steps for shape in shapes), *other_steps))
        roads = _Roads(rehearsal, dtypes, prompt or PROMPT, {shapes[0].inputs: rehearsal})
        profiles: dict[StageProfile, None] = {}
        for shape in shapes:
            for played in roads.play(shape, batches):
                profiles.update(dict.fromkeys(played))
        if tiled and tile(rehearsal):
            for shape in shapes:
                (played,) = roads.play(shape, [1])
                profiles.update({replace(profile, tiled=True): None for profile in played if profile.stage in (DECODE, PIPELINE)})
    components = tuple(
        RehearsedComponent(
            name, rehearsal.weights[name], rehearsal.weights[name] - sum(rehearsal.blocks[name]), rehearsal.blocks[name],
            rehearsal.parameters[name], staying_bytes(name, rehearsal.components[name]))
        for name in rehearsal.weights
    )
    notes = [f"{name}: a stand-in of {tokens} tokens, for its files are not here" for name in rehearsal.stood_in]
    notes += [f"{shape.text}: with a blank picture of that size, for the model does nothing without one" for shape in roads.pictured]
    return Rehearsed(components, tuple(profiles), tuple(notes))


@dataclass(slots=True)
class _Roads:
    """The roads that a list's shapes take, over the same hollow components."""

    rehearsal: Rehearsal
    dtypes: Mapping[str, str]
    prompt: str
    made: dict[tuple[str, ...], Rehearsal]
    pictured: list[ShapeKey] = field(default_factory=list)  # shapes without pictures that were played with one

    def play(self, shape: ShapeKey, batches: Sequence[int]) -> list[tuple[StageProfile, ...]]:
        """Profiles at these batch sizes. Editors of pictures do nothing without one: they get a blank one."""
        if shape in self.pictured:
            return self._played(shape, _PICTURE, batches)
        try:
            return self._played(shape, shape.inputs, batches)
        except Exception:
            found = self._with_picture(shape, batches) if not shape.inputs and _takes_a_picture(self.rehearsal) else None
            if found is None:  # that was not what it lacked: the first error is told
                raise
            self.pictured.append(shape)
            return found

    def _with_picture(self, shape: ShapeKey, batches: Sequence[int]) -> list[tuple[StageProfile, ...]] | None:
        try:
            return self._played(shape, _PICTURE, batches)
        except Exception:  # noqa: BLE001
            return None

    def _played(self, shape: ShapeKey, inputs: tuple[str, ...], batches: Sequence[int]) -> list[tuple[StageProfile, ...]]:
        if inputs not in self.made:
            self.made[inputs] = on_road(self.rehearsal, self.dtypes, inputs)
        found = play_batches(self.made[inputs], job_of(replace(shape, inputs=inputs), self.prompt), batches)
        return [tuple(replace(profile, shape=shape.text) for profile in played) for played in found]


def _takes_a_picture(rehearsal: Rehearsal) -> bool:
    """Whether the model's own pipeline takes one. One that makes pictures of words alone never lacked it, whatever failed."""
    arguments = call_arguments(rehearsal.stages.folder.pipeline_class)
    return not arguments or "image" in arguments


def play_batches(rehearsal: Rehearsal, job: Job, batches: Sequence[int]) -> list[tuple[StageProfile, ...]]:
    """The job at these batch sizes, the smallest first; no more of them once two have shown that every peak grows with its rows."""
    found: list[tuple[StageProfile, ...]] = []
    for batch in sorted(batches):
        if len(found) > 1 and _on_a_line(*found[-2:]):
            break
        found.append(play(rehearsal, job, batch))
    return found


def _on_a_line(fewer: Sequence[StageProfile], more: Sequence[StageProfile]) -> bool:
    """Whether each stage needs as much more as it has more rows. A stage that takes one row at a time has nothing to show."""
    pairs = [(one, other) for one, other in zip(fewer, more, strict=True) if one.batch != other.batch]
    return all(
        abs(other.activation_bytes * one.batch - one.activation_bytes * other.batch) <= _ON_A_LINE * one.activation_bytes * other.batch
        for one, other in pairs
    )
