"""A model's view of its configuration: its own inputs and outputs, and what only it sees (pure)."""

from __future__ import annotations

from typing import Any

from shmserve.ipc.tensors import padding
from shmserve.workers.batch import ragged
from shmserve.workers.sequences import config as sequences


def as_model_sees(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what the server makes among its inputs and outputs: controls and states of
    sequences, `batch_input`, lengths and masks of padded inputs. Clients neither send nor get
    them."""
    seen = sequences.as_model_sees(config)
    made = ragged.made_inputs(config) + padding.made_inputs(config)
    return {**seen, "input": [*seen["input"], *made]} if made else seen


def made_here(config: dict[str, Any]) -> frozenset[str]:
    """The names of all that. `config` need not be complete."""
    named = [name for each in config.get("batch_input") or () for name in each["target_name"]]
    for entry in padding.entries(config).values():
        named += [entry[key] for key in ("lengths", "mask") if isinstance(entry.get(key), str)]
    return sequences.of_sequences(config) | frozenset(named)
