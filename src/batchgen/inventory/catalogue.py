"""Cards people have, from configs/gpus.toml: memory and rates, so that a plan can be made for a machine that is not here."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from batchgen.errors import UsageError
from batchgen.inventory.profiles import config_dir
from batchgen.inventory.records import DeviceFacts, DeviceRates
from batchgen.units import MIB


@dataclass(frozen=True, slots=True)
class Card:
    """One entry of the catalogue."""

    name: str
    memory_bytes: int  # as the driver reports it
    rates: DeviceRates
    source: str
    names: tuple[str, ...] = ()  # other names, as the driver or people say them

    @property
    def memory_gb(self) -> float:
        return self.memory_bytes / MIB / 1024


@cache
def catalogue() -> tuple[Card, ...]:
    """Every card, in the file's order. Rates in FLOP/s and bytes/s."""
    data = tomllib.loads((config_dir() / "gpus.toml").read_text(encoding="utf-8"))
    return tuple(
        Card(
            name=raw["name"], memory_bytes=raw["memory_mib"] * MIB, source=raw["source"], names=tuple(raw.get("names", ())),
            rates=DeviceRates(
                raw["dense_bf16_tflops"] * 1e12, raw["memory_gb_s"] * 1e9, raw["host_link_gb_s"] * 1e9,
                raw["device_link_gb_s"] * 1e9 if "device_link_gb_s" in raw else None,
            ),
        )
        for raw in data["gpu"]
    )  # fmt: skip


def find_card(name: str, *, option: str = "--gpu") -> Card:
    """The card of that name, spaces, hyphens and letter case aside. Raises UsageError, for that option, with the nearest one."""
    wanted = _plain(name)
    by_name = {_plain(text): card for card in catalogue() for text in (card.name, *card.names)}
    if wanted in by_name:
        return by_name[wanted]
    near = difflib.get_close_matches(wanted, list(by_name), n=1, cutoff=0.6)
    question = f" Did you mean {by_name[near[0]].name!r}?" if near else ""
    raise UsageError(f"{option}: there is no {name!r} in the catalogue.{question}", option=option,
                     hint=f"Known: {', '.join(card.name for card in catalogue())}. Or state it with --device-memory.")  # fmt: skip


def cards(specs: Sequence[str], *, option: str = "--gpu") -> tuple[DeviceFacts, ...]:
    """Idle devices from entries `NAME`, `NAMExN` (`RTX 4090x2`) or `Nx NAME` of that option. Raises UsageError."""
    found: list[DeviceFacts] = []
    for spec in specs:
        text, count = _count(spec)
        card = find_card(text, option=option)
        if not 1 <= count <= 1024:
            raise UsageError(f"{option} {spec}: {count} is no number of cards from 1 to 1024", option=option, hint="Write NAME or NAMExN.")
        for _ in range(count):
            found.append(DeviceFacts(card.name, f"cuda:{len(found)}", card.memory_bytes, card.memory_bytes))
    return tuple(found)


def rates_of(device_name: str) -> DeviceRates | None:
    """Rates of a device by the name its driver gives; None for one the catalogue does not know."""
    plain = _plain(device_name)
    best = [
        (len(_plain(text)), card) for card in catalogue() for text in (card.name, *card.names) if _plain(text) == plain
    ]  # fmt: skip
    return max(best, key=lambda found: found[0])[1].rates if best else None


def _count(spec: str) -> tuple[str, int]:
    # as people write it too: "2x RTX 4090", "2 × RTX 4090"
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(.*\d.*)", spec.strip(), re.IGNORECASE)
    if match is not None:
        return match.group(2), int(match.group(1))
    # Every card has a number in its name: the x of "RTX 4090" comes before it, the one of "RTX 4090x2" behind.
    match = re.fullmatch(r"(.*\d.*?)\s*[x×]\s*(\d+)", spec.strip(), re.IGNORECASE)
    return (match.group(1), int(match.group(2))) if match is not None else (spec, 1)


def _plain(name: str) -> str:
    words = re.sub(r"[\s_-]+", "", name.lower())
    for vendor in ("nvidia", "geforce"):
        words = words.replace(vendor, "")
    return words
