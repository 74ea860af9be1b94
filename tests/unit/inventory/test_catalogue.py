"""The catalogue of cards: whole, plausible, with sources; found by the names people and drivers use."""

from __future__ import annotations

import tomllib

import pytest

from batchgen.errors import UsageError
from batchgen.inventory import catalogue
from batchgen.inventory.profiles import config_dir

CARDS = {card.name: card for card in catalogue.catalogue()}
KEYS = {"name", "names", "memory_mib", "dense_bf16_tflops", "memory_gb_s", "host_link_gb_s", "source", "device_link_gb_s"}


def test_there_are_cards_from_eight_gb_to_h200_and_b200() -> None:
    assert len(CARDS) >= 25
    assert min(card.memory_gb for card in CARDS.values()) < 8.5
    assert {"H200 141GB", "B200 180GB", "RTX 4090", "A100 80GB"} <= set(CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_plausible_and_says_its_source(name: str) -> None:
    card = CARDS[name]
    assert 7 < card.memory_gb < 300
    assert 5e12 < card.rates.dense_bf16_flops < 3e15
    assert 2e11 < card.rates.memory_bytes < 1e13
    # Weights never come from the host faster than from the card's own memory.
    assert 1e10 < card.rates.host_link_bytes < card.rates.memory_bytes
    assert len(card.source) > 20


def test_the_file_has_no_key_that_nobody_reads() -> None:
    raw = tomllib.loads((config_dir() / "gpus.toml").read_text(encoding="utf-8"))
    assert set(raw) == {"gpu"}
    for entry in raw["gpu"]:
        assert KEYS - {"names", "device_link_gb_s"} <= set(entry) <= KEYS, entry["name"]


def test_no_two_cards_share_a_name() -> None:
    names = [catalogue._plain(text) for card in CARDS.values() for text in (card.name, *card.names)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "RTX 4090"), ("rtx4090", "RTX 4090"), ("RTX-4090", "RTX 4090"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("H100", "H100 80GB"), ("NVIDIA H100 80GB HBM3", "H100 80GB"), ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("Tesla T4", "T4"), ("NVIDIA L40S", "L40S"),
        ("NVIDIA H200", "H200 141GB"), ("NVIDIA RTX A6000", "RTX A6000"), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)  # fmt: skip
def test_a_card_is_found_as_people_and_drivers_say_it(text: str, name: str) -> None:
    assert catalogue.find_card(text).name == name
    rates = catalogue.rates_of(text)
    assert rates == CARDS[name].rates


def test_a_card_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="'RTX 5090'"):
        catalogue.find_card("RTX 5091")
    assert catalogue.rates_of("NVIDIA GeForce RTX 5091") is None


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["RTX 4090x2"], ["RTX 4090"] * 2), (["RTX 4090 x 2"], ["RTX 4090"] * 2), (["RTX 4090×3"], ["RTX 4090"] * 3),
        (["L40", "L40S"], ["L40", "L40S"]), (["H100 80GBx8"], ["H100 80GB"] * 8), (["rtx 4090"], ["RTX 4090"]),
    ],
)  # fmt: skip
def test_counts(specs: list[str], names: list[str]) -> None:
    found = catalogue.cards(specs)
    assert [facts.name for facts in found] == names
    assert [facts.torch_name for facts in found] == [f"cuda:{number}" for number in range(len(names))]
    assert all(facts.available_bytes == facts.total_bytes == CARDS[facts.name].memory_bytes for facts in found)


@pytest.mark.parametrize("spec", ["RTX 4090x0", "RTX 4090x99999"])
def test_a_count_out_of_range_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="--gpu"):
        catalogue.cards([spec])
