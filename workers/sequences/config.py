"""What a model with sequences sees besides its own inputs and outputs (pure)."""

from __future__ import annotations

from typing import Any

from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.workers.sequences import controls


def as_model_sees(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with control inputs and states among its inputs and outputs: clients neither send
    nor get them."""
    batching = config.get("sequence_batching")
    if not batching:
        return config
    states = batching.get("state") or ()
    inputs = [*config["input"]]
    inputs += [
        {"name": control.name, "data_type": TO_CONFIG[control.datatype], "dims": [1]}
        for control in controls.read(config)
    ]
    inputs += [_tensor(state, state["input_name"]) for state in states]
    outputs = [*config["output"]]
    known = {output["name"] for output in outputs}
    outputs += [
        _tensor(state, state["output_name"])
        for state in states
        if state["output_name"] not in known
    ]
    return {**config, "input": inputs, "output": outputs}


def of_sequences(config: dict[str, Any]) -> frozenset[str]:
    """The names of the control inputs and of the states: what only the model sees."""
    batching = config.get("sequence_batching") or {}
    states = batching.get("state") or ()
    names = [control.name for control in controls.read(config)]
    names += [state[field] for state in states for field in ("input_name", "output_name")]
    return frozenset(names)


def _tensor(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {"name": name, "data_type": state["data_type"], "dims": state["dims"]}
