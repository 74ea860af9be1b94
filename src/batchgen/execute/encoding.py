"""The encode stages of a window: every text once over the whole run, every picture input once a job.

Prompts and negative prompts are encoded and kept apart, so that the one negative most rows share costs one row, whatever prompts it
goes with.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from batchgen.errors import RunStoppedError
from batchgen.events import FailureKind
from batchgen.execute.arguments import call_arguments
from batchgen.execute.guidance import GuidanceRules
from batchgen.execute.pictures import Pictures, fitted, read_inputs
from batchgen.execute.runner import Runner, Task
from batchgen.execute.stages import DECODE, DENOISE, RESIZED, Item, Stage, Stages, call_stage, split_rows, to_host
from batchgen.execute.windows import BatchSizes, EncodedCache, Row

NEGATIVE = "negative_"


@dataclass(frozen=True, slots=True)
class Text:
    """One row of an encode: a prompt, and the negative prompt encoded with it. `pair` False: the negative is not wanted."""

    prompt: str
    negative: str | None = None
    pair: bool = False


class Encoding:
    """Runs the encode stages over a window's rows; leaves what they give in the rows' `values`."""

    def __init__(self, runner: Runner, sizes: BatchSizes, cache: EncodedCache, stages: Stages, rules: GuidanceRules) -> None:
        self.runner, self.sizes, self.cache, self.stages, self.rules = runner, sizes, cache, stages, rules
        later = [stage for stage in stages.stages if stage.name in (DENOISE, DECODE)]
        self.lora: str | None = None
        self.wanted = frozenset().union(*(stage.inputs for stage in later)) - {"batch_size"}

    def run(self, rows: Sequence[Row]) -> None:
        for stage in self.stages.encoders:
            rows = self.runner.alive(rows)
            for lora, group in self._by_lora(stage, rows):
                self.lora = lora
                if stage.encodes_text and not stage.per_row:
                    self._texts(stage, group)
                else:
                    self._pictures(stage, group)

    def _by_lora(self, stage: Stage, rows: Sequence[Row]) -> list[tuple[str | None, list[Row]]]:
        """Rows apart by LoRA where one alters what this stage computes: equal texts then encode differently."""
        if not self.runner.components.loras.touching(stage.components):
            return [(None, list(rows))]
        groups: dict[str | None, list[Row]] = {}
        for row in rows:
            groups.setdefault(row.job.lora, []).append(row)
        return list(groups.items())

    def _place(self, stage: Stage) -> tuple[str, str | None]:
        """Which encoder made an embedding: the stage, and the LoRA in it."""
        return stage.name, self.lora

    # -- texts ------------------------------------------------------------------------------------------------------

    def _texts(self, stage: Stage, rows: Sequence[Row]) -> None:
        found: dict[Hashable, dict[str, Any]] = {}
        reasons: dict[Hashable, tuple[FailureKind, str]] = {}
        gives_negatives = any(name.startswith(NEGATIVE) for name in stage.outputs)
        keys = {
            row.job.key: (("prompt", self._place(stage), row.job.prompt), ("negative", self._place(stage), self._negative(stage, row)))
            for row in rows
        }
        for pair in keys.values():
            for key in pair:
                value = self.cache.get(key)
                if value is not None:
                    found[key] = value
        prompts = dict.fromkeys(pair[0][2] for pair in keys.values() if pair[0] not in found)
        negatives = dict.fromkeys(pair[1][2] for pair in keys.values() if gives_negatives and pair[1] not in found)
        any_prompt = next((pair[0][2] for pair in keys.values()), "")
        served: dict[str, list[Row]] = {}
        for row in rows:
            served.setdefault(row.job.prompt, []).append(row)

        def fail(text: Text, kind: FailureKind, reason: str) -> None:
            reasons["prompt", self._place(stage), text.prompt] = kind, reason
            reasons["negative", self._place(stage), text.negative] = kind, reason

        def work(texts: Sequence[Text]) -> None:
            self._encode(stage, texts, found, served)

        def served_keys(texts: Sequence[Text]) -> tuple[str, ...]:
            return tuple(row.job.key for text in texts for row in served.get(text.prompt, ()))

        family = self.stages.family
        pairs_only = gives_negatives and family is not None and family.pairs_only
        kinds = self._plan(list(prompts), list(negatives), str(any_prompt), pairs_only=pairs_only)
        tasks = [Task(None, kind, self.sizes.of(stage.name, None, None), work, fail, served_keys) for kind in kinds]
        self.runner.run(stage, tasks, self.stages.named(DENOISE).components)
        self._hand_out(stage, rows, keys, found, reasons)

    def _negative(self, stage: Stage, row: Row) -> str | None:
        """The negative that the row's own branch reads; without a second branch the model's empty one stands in."""
        if not row.guidance.on or "negative_prompt" not in stage.inputs:
            return None if stage.guiders else ""
        if row.job.negative_prompt is None and not stage.guiders:
            return ""
        return row.job.negative_prompt

    @staticmethod
    def _plan(prompts: list[str], negatives: list[str | None], any_prompt: str, *, pairs_only: bool = False) -> list[list[Text]]:
        """Batches of one kind: negatives with a prompt that is needed anyway, the one for None apart, then the other prompts.

        pairs_only: those take a negative along all the same, as in the ordinary call.
        """
        left = list(prompts)

        def partner() -> str:
            return left.pop(0) if left else any_prompt

        named = [Text(partner(), negative, pair=True) for negative in negatives if negative is not None]
        nothing = [Text(partner(), None, pair=True)] if None in negatives else []
        if pairs_only:
            nothing += [Text(prompt, None, pair=True) for prompt in left]
            left = []
        return [kind for kind in (named, nothing, [Text(prompt) for prompt in left]) if kind]

    def _encode(self, stage: Stage, texts: Sequence[Text], found: dict[Hashable, dict[str, Any]], served: dict[str, list[Row]]) -> None:
        pair = texts[0].pair
        self.runner.components.loras.use(stage.components, self.lora)
        arguments = call_arguments(self.stages.call, None, len(texts))
        arguments["prompt"] = [text.prompt for text in texts]
        if pair and texts[0].negative is not None and "negative_prompt" in stage.inputs:
            arguments["negative_prompt"] = [text.negative for text in texts]
        guiders = {name: self.rules.text_guider(getattr(stage.pipe, name), negatives=pair) for name in stage.guiders}
        started = time.perf_counter()
        outputs = call_stage(stage, arguments, guiders)
        seconds = time.perf_counter() - started
        wanted = {name: value for name, value in outputs.items() if value is not None and self._is_wanted(stage, name)}
        split = {name: split_rows(value, len(texts)) for name, value in wanted.items()}
        rows_made = [{name: to_host(values[index]) for name, values in split.items()} for index in range(len(texts))]
        for text, made in zip(texts, self.runner.group.settled(f"what {stage.name} gives", rows_made), strict=True):
            negative = {name: value for name, value in made.items() if name.startswith(NEGATIVE)}
            prompt = {name: value for name, value in made.items() if name not in negative}
            self._put(stage, found, ("prompt", self._place(stage), text.prompt), prompt)
            if pair:
                self._put(stage, found, ("negative", self._place(stage), text.negative), negative)
        rows = [row for text in texts for row in served.get(text.prompt, ())]
        for row in rows:
            row.seconds += seconds / max(1, len(rows))
        self.runner.batch_done(stage, None, rows, len(texts), seconds)

    def _is_wanted(self, stage: Stage, name: str) -> bool:
        return name in self.wanted or name in stage.denoiser_fields

    def _put(self, stage: Stage, found: dict[Hashable, dict[str, Any]], key: Hashable, value: dict[str, Any]) -> None:
        if key not in found:
            self._check_apart(stage, found, key, value)
            found[key] = value
            self.cache.put(key, value)

    def _check_apart(self, stage: Stage, found: dict[Hashable, dict[str, Any]], key: Any, value: dict[str, Any]) -> None:
        """Raises RunStoppedError where texts come out alike: a token table that was never loaded makes a night of nonsense."""
        if self.cache.tells_apart or not value:
            return
        for other, earlier in found.items():
            if isinstance(other, tuple) and other[:2] == key[:2] and _differ_early(other[2], key[2]):
                # a second encoder may have nothing to say about either text (glyphs that neither quotes): all must be alike
                verdicts = [_same(value[name], earlier[name]) for name in value.keys() & earlier.keys()]
                if True in verdicts and False not in verdicts:
                    raise RunStoppedError(
                        f"{stage.name} gives the same for different texts: its weights or its tokenizer cannot be right",
                        hint="the download or conversion of the text encoder or of its tokenizer is damaged",
                    )
                self.cache.tells_apart = True
                return

    def _hand_out(
        self, stage: Stage, rows: Sequence[Row], keys: dict[str, Any], found: dict[Hashable, dict[str, Any]],
        reasons: dict[Hashable, tuple[FailureKind, str]],
    ) -> None:
        for row in rows:
            for key in keys[row.job.key]:
                if key in found:
                    row.values.update(found[key])
                elif key in reasons:
                    kind, reason = reasons[key]
                    self.runner.fail_job(row.job, kind, stage.name, reason)

    # -- pictures ---------------------------------------------------------------------------------------------------

    def _pictures(self, stage: Stage, rows: Sequence[Row]) -> None:
        """Encoders of pictures take one picture a call. Rows that ask for the same share the result, unless noise was drawn for it."""
        found: dict[Hashable, dict[str, Any]] = {}

        def work(batch: Sequence[Row]) -> None:
            for row in batch:
                self._picture(stage, row, found)

        def fail(row: Row, kind: FailureKind, reason: str) -> None:
            self.runner.fail_job(row.job, kind, stage.name, reason)

        self.runner.run(stage, [Task(None, rows, 1, work, fail)])

    def _picture(self, stage: Stage, row: Row, found: dict[Hashable, dict[str, Any]]) -> None:
        job = row.job
        negative = self._negative(stage, row)
        text = (job.prompt, negative) if stage.encodes_text else ()
        key = (stage.name, job.image, job.last_image, job.mask, job.width, job.height, job.num_frames, job.strength, *text)
        if key in found:
            row.values.update(found[key])
            return
        pictures = read_inputs(job)
        self.runner.components.loras.use(stage.components, self.lora)
        generator = row.generator_now()
        before = generator.get_state()
        arguments = call_arguments(self.stages.call, job, 1) | row.values | {"generator": [generator]}
        if stage.encodes_text:
            arguments |= {"prompt": [job.prompt]} | ({"negative_prompt": [negative]} if negative is not None else {})
        guiders = {name: self.rules.text_guider(getattr(stage.pipe, name), negatives=True) for name in stage.guiders}
        started = time.perf_counter()
        outputs = call_stage(stage, arguments | self._named(pictures), guiders)
        if _resized(outputs, arguments):
            # the stage chose another size, after the picture's own shape: the size asked for wins, as in the ordinary call
            size = (arguments["width"], arguments["height"])
            outputs = call_stage(stage, arguments | fitted(pictures, size), guiders)
        # a list from an encoder of pictures is one row's own (several reference pictures), not one element a row
        values = {
            name: to_host(value if isinstance(value, list) else split_rows(value, 1)[0]) for name, value in outputs.items()
            if value is not None and name not in ("height", "width") and self._is_wanted(stage, name)
        }
        values = self.runner.group.settled(f"what {stage.name} gives", values)
        seconds = time.perf_counter() - started
        row.values.update(values)
        row.seconds += seconds
        if torch.equal(before, generator.get_state()):
            found[key] = values
        else:
            row.generator = generator.get_state()
        self.runner.batch_done(stage, row.shape, [row], 1, seconds)


    def _named(self, pictures: dict[str, Pictures]) -> dict[str, Pictures]:
        """Under the names that steps without a resizing before them take, too."""
        family = self.stages.family
        if family is None or not family.unresized:
            return pictures
        return pictures | {f"{RESIZED}{name}": picture for name, picture in pictures.items()}


def _differ_early(one: str | None, other: str | None) -> bool:
    """Within what the shortest tokenizer keeps."""
    return (one or "")[:40].split() != (other or "")[:40].split()


def _same(one: Any, other: Any) -> bool | None:
    """Whether two embeddings [1, tokens, ...] are alike; None for what says nothing: masks, and what is pooled from one token."""
    if isinstance(one, Item) and isinstance(other, Item):
        one, other = one.value[None], other.value[None]
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.dim() < 3 or not one.is_floating_point():
        return None
    # kernels round differently in batches of other sizes; texts that differ do so by as much as the values themselves
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-2 * one.abs().max())


def _resized(outputs: dict[str, Any], arguments: dict[str, Any]) -> bool:
    return any(outputs.get(name) is not None and arguments.get(name) not in (None, outputs[name]) for name in ("width", "height"))
