"""Known models built whole, without weights: what their configs make is what their facts say."""

from __future__ import annotations

import pytest
import torch

from batchgen.execute import rehearse
from batchgen.inventory.known import Known, known_models
from batchgen.rehearsal.calls import small_collections

QUICK = "black-forest-labs/flux.2-klein-4b"  # its VAE stores statistics besides its weights
MODELS = [
    pytest.param(known, id=known.model, marks=() if model == QUICK else (pytest.mark.long,)) for model, known in known_models().items()
]


def _stored(module: torch.nn.Module) -> int:
    """Numbers in a file of the module: weights and kept buffers, what is tied once."""
    held = {id(tensor): tensor.numel() for tensor in module.state_dict(keep_vars=True).values()}
    return sum(held.values())


@pytest.mark.parametrize("known", MODELS)
def test_a_known_model_holds_as_many_numbers_as_its_facts_say(known: Known) -> None:
    with small_collections():
        run = rehearse.hollow_rehearsal(str(known.folder), known.stored)
    assert {name: _stored(part) for name, part in run.components.items()} == known.parameters
