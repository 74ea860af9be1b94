"""Re-evaluates a plan from its trail: gets each entry's rule, subject and numbers, never its decision or text.

Shares no code with the rules. Every comparison is made anew from the numbers, each entry must follow from the ones before it, and
every rule that the mode has must have spoken. What does not hold raises Broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Numbers = Mapping[str, Any]
Entry = tuple[str, str, Numbers]

# Whose answer is needed, in this order, beside the threshold and the replicas.
ASKED = {
    "auto": ["base-offload", "layerwise-defaults", "layerwise-dit", "fsdp", "keep-resident", "twice-over"],
    "memory": ["base-offload", "layerwise-defaults", "layerwise-dit"],
    "speed": ["unset-resident", "fsdp"],
    "manual": ["unset-resident"],
}


class Broken(Exception):
    """The trail does not hold together."""


@dataclass
class Result:
    modes: dict[str, str] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    threshold: tuple[float | None, str] | None = None
    answers: dict[tuple[str, str], str] = field(default_factory=dict)
    replicas: int | None = None
    cfg_parallel: bool | None = None

    @property
    def fsdp(self) -> bool:
        return self.answers.get(("fsdp", "fsdp")) == "yes"


def replay(entries: Iterable[Entry], *, mode: str, platform: str, components: Iterable[str]) -> Result:
    """The result that the entries add up to. `components`: the model's names, so that an entry about one is known as such."""
    machine = _Machine(mode, platform, tuple(components))
    for rule, subject, numbers in entries:
        machine.read(rule, subject, numbers)
    machine.finish()
    return machine.result


def at_least(available_gb: float, threshold_gb: float | None) -> bool:
    return threshold_gb is not None and round(available_gb * 2**30) >= round(threshold_gb * 2**30)


class _Machine:
    def __init__(self, mode: str, platform: str, components: tuple[str, ...]) -> None:
        self.mode, self.platform, self.components = mode, platform, components
        self.result = Result()
        self.covered: list[str] = []
        self.announced = 0  # component entries that the layerwise rule still has to say
        self.kept: list[str] = []
        self.dit_by = ""
        self.fsdp_by = ""

    def read(self, rule: str, subject: str, numbers: Numbers) -> None:
        if subject in self.components:
            self.component(rule, subject, numbers)
            return
        if rule == "explicit":
            answer = "binds nothing" if numbers["bound"] == 0 else "binds"
        else:
            answer = str(getattr(self, f"ask_{rule.replace('-', '_')}")(numbers))
        if (rule, subject) in self.result.answers:
            raise Broken(f"{rule} answers twice")
        self.result.answers[rule, subject] = answer

    def component(self, rule: str, name: str, numbers: Numbers) -> None:
        if numbers["was"] != self.result.modes.get(name):
            raise Broken(f"{rule}: {name} was {self.result.modes.get(name)}, not {numbers['was']}")
        if "was_by" in numbers and numbers["was_by"] != self.result.by.get(name):
            raise Broken(f"{rule}: {name} was placed by {self.result.by.get(name)}, not {numbers['was_by']}")
        mode, by = getattr(self, f"place_{rule.replace('-', '_')}")(numbers)
        self.result.modes[name] = mode
        self.result.by[name] = by or self.result.by[name]

    def needs(self, rule: str, answer: str) -> None:
        found = next((given for (said, _subject), given in self.result.answers.items() if said == rule), None)
        if found != answer:
            raise Broken(f"{rule} should have said {answer}, not {found}")

    def limit(self, numbers: Numbers) -> float | None:
        if self.result.threshold is None or self.result.threshold[0] != numbers["threshold_gb"]:
            raise Broken("another threshold was used than holds")
        return self.result.threshold[0]

    def limit_source(self) -> str:
        if self.result.threshold is None:
            raise Broken("no threshold was found")
        return self.result.threshold[1]

    def finish(self) -> None:
        said = [rule for rule, _subject in self.result.answers]
        asked = ASKED[self.mode] if self.platform == "cuda" else ["unset-resident"]
        # An explicit --fsdp or --no-fsdp is answered first.
        early = "fsdp" in said and (asked[0] not in said or said.index("fsdp") < said.index(asked[0]))
        expected = [rule for rule in asked if rule != "fsdp" or not early]
        if [rule for rule in said if rule in expected] != expected:
            raise Broken(f"{expected} should have spoken, {said} did")
        if ("profile", "profile") not in self.result.answers:
            raise Broken("nobody said which profile holds")
        if self.announced:
            raise Broken("the layerwise rule announced more components than it spoke of")
        if set(self.result.modes) != set(self.components) or self.result.threshold is None or self.result.replicas is None:
            raise Broken("something was left open")

    def ask_profile(self, n: Numbers) -> str:
        return str(n["name"])

    # The user's options.

    def ask_threshold(self, n: Numbers) -> str:
        for source in ("user", "model", "task", "global"):
            value = n[f"{source}_gb"]
            if value is not None:
                self.result.threshold = (None if value == "never" else float(value), source)
                return "never" if value == "never" else f"{value:g}"
        raise Broken("no threshold")

    def place_explicit(self, n: Numbers) -> tuple[str, str]:
        option, item = n["option"], n["item"]
        if option == "--component-residency":
            return item.partition("=")[2], "user"
        if "layerwise" in option and not option.startswith("--no-"):
            return "layerwise-offload", "user"
        return ("resident" if option.startswith("--no-") or item == "none" else "component-offload"), "user"

    # Sharding.

    def ask_fsdp(self, n: Numbers) -> str:
        if n["option"] is not None:
            self.fsdp_by = "user"
            return "yes" if n["option"] == "--fsdp" and n["devices"] >= 2 and n["free_dits"] > 0 else "no"
        self.fsdp_by = "model"
        auto = n["performance_mode"] == "auto"
        wanted = n["devices"] >= 2 and n["dits"] > 0 and n["chosen_dits"] == 0 and n["profile_min_available_gb"] is not None
        room = not auto or (at_least(n["available_gb"], n["profile_min_available_gb"]) and n["offloaded_dits"] > 0)
        guided = n["uses_cfg"] or not n["requires_cfg"]
        fits = n["weights_bytes"] is not None and 2 * n["weights_bytes"] <= n["available_bytes"]
        return "yes" if wanted and room and guided and not fits else "no"

    def place_fsdp(self, n: Numbers) -> tuple[str, str]:
        self.needs("fsdp", "yes")
        return ("fsdp" if n["role"] == "dit" else "resident"), self.fsdp_by

    # Where unset components start.

    def ask_unset_resident(self, n: Numbers) -> str:
        return "resident"

    def place_unset_resident(self, n: Numbers) -> tuple[str, str]:
        self.needs("unset-resident", "resident")
        return "resident", "default"

    def ask_base_offload(self, n: Numbers) -> str:
        self.covered = [] if n["fsdp"] else ["dit"]
        self.covered.append("text_encoder")
        if not at_least(n["total_gb"], n["small_card_gb"]) or n["task"] != "image":
            self.covered.append("image_encoder")
        return ",".join(self.covered)

    def place_base_offload(self, n: Numbers) -> tuple[str, str]:
        if not self.covered:
            raise Broken("base offload did not say what it covers")
        role = "dit" if n["role"] == "dit helper" else n["role"]
        return ("component-offload" if role in self.covered else "resident"), "default"

    def place_memory_mode(self, n: Numbers) -> tuple[str, str]:
        if self.mode != "memory" or n["was"] != "resident":
            raise Broken("memory mode's rest in another mode, or about what is not resident")
        return "component-offload", "default"

    # Streaming.

    def ask_layerwise_defaults(self, n: Numbers) -> str:
        self.announced = n["components"]
        return "yes" if n["option"] is None else "no"

    def place_layerwise_defaults(self, n: Numbers) -> tuple[str, str]:
        self.announced -= 1
        streams = self.result.answers.get(("layerwise-defaults", "plan")) == "yes"
        auto = n["performance_mode"] == "auto"
        enough = auto and at_least(n["available_gb"], self.limit(n))
        if enough and n["profile_keeps"]:
            return n["was"], ""
        if not streams:
            return "component-offload", "default"
        return "layerwise-offload", self.limit_source() if auto and n["profile_keeps"] else "default"

    def ask_layerwise_dit(self, n: Numbers) -> str:
        modes = n["profile_modes"].split(",")
        free = n["dits"] > 0 and n["chosen_dits"] == 0 and not n["fsdp"] and n["option"] is None
        listed = n["performance_mode"] in modes
        upper, lower = map(int, n["fraction"].split("/"))
        largest = n["largest_dit_bytes"]
        over = n["unknown_sizes"] == 0 and largest is not None and largest * lower > n["available_bytes"] * upper
        below = not at_least(n["available_gb"], self.limit(n))
        self.dit_by = "model" if listed else "size"
        return "yes" if free and (listed or (n["performance_mode"] == "auto" and "memory" in modes and below and over)) else "no"

    def place_layerwise_dit(self, n: Numbers) -> tuple[str, str]:
        self.needs("layerwise-dit", "yes")
        return "layerwise-offload", self.dit_by

    # What stays after all.

    def ask_keep_resident(self, n: Numbers) -> str:
        self.kept = n["groups"].split(",")
        return "yes" if at_least(n["available_gb"], self.limit(n)) else "no"

    def place_keep_resident(self, n: Numbers) -> tuple[str, str]:
        role = "dit" if n["role"] == "dit helper" else n["role"]
        if role not in self.kept or n["source"] != self.limit_source():
            raise Broken("kept without a reason")
        return ("resident" if self.result.answers["keep-resident", "plan"] == "yes" else n["was"]), n["source"]

    def ask_twice_over(self, n: Numbers) -> str:
        known = n["unknown_sizes"] == 0 and n["weights_bytes"] is not None
        return "yes" if known and 2 * n["weights_bytes"] <= n["available_bytes"] else "no"

    def place_twice_over(self, n: Numbers) -> tuple[str, str]:
        self.needs("twice-over", "yes")
        return "resident", "size"

    # Several devices.

    def ask_replicas(self, n: Numbers) -> str:
        if n["fsdp"] != self.result.fsdp:
            raise Broken("the replicas were counted for another decision on sharding")
        self.result.replicas = n["devices"] // n["group_size"] if n["fsdp"] else n["devices"]
        return str(self.result.replicas)

    def ask_cfg_parallel(self, n: Numbers) -> str:
        parallel = n["asked"] and n["fsdp"] and n["uses_cfg"] and n["supports"] and n["group_size"] % 2 == 0
        self.result.cfg_parallel = bool(parallel)
        return "yes" if parallel else "no"
