"""The models of a run, and their requests, drawn from a seed."""

import json
from dataclasses import replace
from random import Random
from typing import Any

from shmserve.ipc.engine_settings import (
    ENGINE_PARAMETER,
    LLM_BACKEND,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    EngineSettings,
)
from shmserve.ipc.messages.supervision import SchedulingLimits
from tests.simulation.models import GO, IN, IN2, OUT, WHO, Model, join_inputs


def draw_models(random: Random) -> list[Model]:
    kinds = random.sample(list(_MODEL_DRAWERS), random.randint(1, 3))
    models = [_MODEL_DRAWERS[kind](random, f"m{number}") for number, kind in enumerate(kinds)]
    if random.random() < 0.3:
        steps = [_step(random, f"s{number}") for number in range(random.randint(2, 4))]
        return [*models[:1], *steps, _ensemble(random, "e", steps)]
    return models


def share_process(models: list[Model]) -> None:
    for model in models:
        for part in (model, *model.steps) if model.steps else ():
            part.group = model.name


def fix_sizes(models: list[Model], byte_size: int) -> None:
    """Give the tensors of an ensemble fixed sizes, so that they are in its own memory."""
    for model in models:
        if model.steps and not model.is_decoupled and model.condition < 0:
            model.input_byte_size = byte_size
            sizes = {"IN": byte_size}
            for step, maps in zip(model.steps, model.tensor_maps, strict=True):
                sizes_in = [sizes[maps["input_map"][t["name"]]] for t in step.config["input"]]
                data = (
                    bytes(sizes_in[0]) if len(sizes_in) == 1 else join_inputs(*map(bytes, sizes_in))
                )
                out_size = sizes[maps["output_map"]["OUT"]] = len(step.outputs_of(data, "000")[0])
                step.config.update(_tensors(sizes_in, out_size))
            model.config.update(_tensors([byte_size], out_size))


def _tensors(in_sizes: list[int], out_size: int) -> dict[str, Any]:
    inputs = [{**tensor, "dims": [size]} for tensor, size in zip((IN, IN2), in_sizes, strict=False)]
    outputs = [{**OUT, "dims": [out_size]}, {**WHO, "dims": [len("000")]}]
    return {"input": inputs, "output": outputs}


def _config(name: str, max_batch_size: int, **settings: Any) -> dict[str, Any]:
    return {
        "name": name,
        "max_batch_size": max_batch_size,
        "input": [IN],
        "output": [OUT, WHO],
        "parameters": {},
        "instance_group": [{"kind": "KIND_CPU"}],
        **settings,
    }


def _limits(random: Random, **limits: Any) -> SchedulingLimits:
    return SchedulingLimits(
        execution_timeout_s=random.choice((0.0, 0.0, 0.03)),
        max_queue_size=random.choice((0, 10, 40)),
        **limits,
    )


def _behaviour(random: Random) -> dict[str, Any]:
    min_us = random.choice((20, 200))
    return {
        "instances": random.randint(1, 3),
        "compute_us": (min_us, min_us * random.choice((2, 20, 100))),
        "is_large": random.random() < 0.5,
        "error_probability": random.choice((0.0, 0.0, 0.05)),
        "arena_byte_size": random.choice((1 << 13, 1 << 20)),
    }


def _plain(random: Random, name: str) -> Model:
    return Model(name, _config(name, random.choice((0, 4))), _limits(random), **_behaviour(random))


def _dynamic(random: Random, name: str) -> Model:
    dynamic = {
        "preferred_batch_size": random.choice(([], [2], [2, 4])),
        "max_queue_delay_microseconds": random.choice((0, 100, 5000)),
    }
    config = _config(name, random.choice((4, 8)), dynamic_batching=dynamic)
    if random.random() < 0.3:
        config["parameters"] = {
            "batching_strategy": {"string_value": "adaptive"},
            "target_p99_ms": {"string_value": "5"},
        }
    return Model(name, config, _limits(random), **_behaviour(random))


def _padded_model(random: Random, name: str) -> Model:
    model = _dynamic(random, name)
    padding = {"buckets": random.choice(([], [[20], [40], [80]])), "max_waste": random.random()}
    model.config["parameters"]["padding"] = {"string_value": json.dumps({"IN": padding})}
    return model


def _queue(random: Random, name: str) -> Model:
    policy = {
        "timeout_action": random.choice(("REJECT", "DELAY")),
        "default_timeout_microseconds": random.choice((0, 500, 5000)),
        "allow_timeout_override": random.choice((True, False)),
        "max_queue_size": random.choice((0, 3, 20)),
    }
    dynamic = {
        "priority_levels": random.choice((2, 5)),
        "default_priority_level": 2,
        "default_queue_policy": policy,
        "priority_queue_policy": {"1": {"max_queue_size": 5}},
        "max_queue_delay_microseconds": random.choice((0, 1000)),
    }
    config = _config(name, 4, dynamic_batching=dynamic)
    return Model(name, config, _limits(random), **_behaviour(random))


def _ordered_model(random: Random, name: str) -> Model:
    dynamic = {"preserve_ordering": True, "max_queue_delay_microseconds": random.choice((0, 300))}
    config = _config(name, 4, dynamic_batching=dynamic)
    return Model(name, config, _limits(random), **_behaviour(random))


def _sequences(random: Random, name: str) -> Model:
    fields: dict[str, Any] = {
        "max_sequence_idle_microseconds": random.choice((5_000, 50_000)),
        "control_input": [],
    }
    if random.random() < 0.5:
        fields["oldest"] = {
            "max_candidate_sequences": random.choice((2, 4)),
            "max_queue_delay_microseconds": random.choice((0, 1000)),
        }
    else:
        fields["direct"] = {
            "max_queue_delay_microseconds": random.choice((0, 1000)),
            "minimum_slot_utilization": random.choice((0.0, 0.75)),
        }
    config = _config(name, random.choice((0, 4)), sequence_batching=fields)
    behaviour = {**_behaviour(random), "error_probability": 0.0}
    return Model(name, config, _limits(random), **behaviour)


def _iterative(random: Random, name: str) -> Model:
    model = _sequences(random, name)
    model.config["sequence_batching"]["iterative_sequence"] = True
    if random.random() < 0.4:
        model.config["model_transaction_policy"] = {"decoupled": True}
    return model


def _decoupled(random: Random, name: str) -> Model:
    config = _config(name, random.choice((0, 4)), model_transaction_policy={"decoupled": True})
    if random.random() < 0.5:
        config["parameters"] = {"max_streams": {"string_value": "3"}}
    if config["max_batch_size"] and random.random() < 0.5:
        config["dynamic_batching"] = {"max_queue_delay_microseconds": 500}
    max_responses = random.choice((2, 5, 60))
    return Model(name, config, _limits(random), **_behaviour(random), most_responses=max_responses)


def _cached_model(random: Random, name: str) -> Model:
    model = random.choice((_plain, _dynamic))(random, name)
    byte_size = random.choice((4_000, 100_000))
    model.config["response_cache"] = {"enable": True, "byte_size": byte_size}
    model.arena_byte_size = random.choice((1 << 16, 1 << 20))
    return model


def _limited(random: Random, name: str) -> Model:
    model = random.choice((_plain, _dynamic, _sequences))(random, name)
    resources = [{"name": "R", "global": True, "count": 1}]
    limiter = {"resources": resources, "priority": random.choice((1, 2))}
    model.config["instance_group"] = [{"kind": "KIND_CPU", "rate_limiter": limiter}]
    model.limits = replace(model.limits, rate_limited=True)
    return model


def generative(random: Random, name: str) -> Model:
    speculation = {"enabled": True, "adaptive_length": random.random() < 0.5}
    block_size = random.choice((1, 4))
    settings = {
        "block_size": block_size,
        "kv_cache_blocks": random.choice((80, 120, 200)) // block_size,
        "swap_blocks": random.choice((0, 30, 200)) // block_size,
        "max_batch_size": random.choice((4, 8)),
        "max_tokens_per_batch": random.choice((10, 64)),
        "prefill_chunk_size": random.choice((3, 16, 32)),
        "max_waiting_requests": random.choice((5, 20, 500)),
        "scheduling_policy": random.choice(SCHEDULING_POLICIES),
        "preemption_mode": random.choice(PREEMPTION_MODES),
        "enable_preemption": random.random() < 0.9,
        "enable_prefix_caching": random.random() < 0.8,
        "speculative_decoding": speculation if random.random() < 0.3 else {},
    }
    config: dict[str, Any] = {
        "backend": LLM_BACKEND,
        "model_transaction_policy": {"decoupled": True},
        "parameters": {ENGINE_PARAMETER: {"string_value": EngineSettings.of(settings).json_text}},
    }
    own = {**_behaviour(random), "is_large": False, "compute_us": (20, random.choice((100, 900)))}
    return Model(name, _config(name, 0, **config), _limits(random), **own)


def _step(random: Random, name: str) -> Model:
    return random.choice((_plain, _dynamic, _cached_model))(random, name)


def _ensemble(random: Random, name: str, steps: list[Model]) -> Model:
    """Draw an ensemble: a chain or a diamond.

    In a chain, each step reads the output of the step before it. In a diamond, the last step joins
    the outputs of two steps. A step may be decoupled, and a later step may have a condition.
    """
    last_index = len(steps) - 1
    inputs = [{"IN": f"T{number - 1}" if number else "IN"} for number in range(last_index + 1)]
    if last_index >= 2 and random.random() < 0.5:
        inputs[last_index - 1] = inputs[last_index - 2]
        inputs[last_index] = {"IN": f"T{last_index - 2}", "IN2": f"T{last_index - 1}"}
        steps[last_index].reads_second_input = True
        optional = random.random() < 0.5
        steps[last_index].config["input"] = [IN, {**IN2, "optional": optional}]
    scheduling = [
        {
            "model_name": step.name,
            "model_version": -1,
            "input_map": input_map,
            "output_map": {"OUT": f"T{number}"},
        }
        for number, (step, input_map) in enumerate(zip(steps, inputs, strict=True))
    ]
    scheduling[-1]["output_map"] = {"OUT": "OUT", "WHO": "WHO"}
    max_in_flight = random.choice((0, 2))
    config = _config(
        name, 0, ensemble_scheduling={"step": scheduling, "max_inflight_requests": max_in_flight}
    )
    if random.random() < 0.2:
        config["response_cache"] = {"enable": True, "byte_size": 100_000}
    model = Model(name, config, _limits(random), instances=0, steps=tuple(steps))
    if random.random() < 0.3:
        _make_decoupled(random, model, steps[max(0, last_index - 2)])
    if random.random() < 0.4:
        _set_condition(random, model, last_index - random.randint(0, min(1, last_index - 1)))
    return model


def _make_decoupled(random: Random, ensemble: Model, step: Model) -> None:
    for model in (ensemble, step):
        model.config["model_transaction_policy"] = {"decoupled": True}
        model.config.pop("response_cache", None)
    step.most_responses = random.choice((2, 5, 60))


def _set_condition(random: Random, ensemble: Model, number: int) -> None:
    """Give a step a condition, set by the client or by the first step."""
    ensemble.condition = number
    ensemble.config["parameters"][f"step[{number}].condition"] = {"string_value": "GO"}
    first_step = ensemble.steps[0]
    if first_step.is_decoupled or random.random() < 0.5:
        ensemble.config["input"] = [IN, GO]
    else:
        first_step.returns_condition = True
        first_step.config["output"] = [OUT, WHO, GO]
        ensemble.tensor_maps[0]["output_map"]["GO"] = "GO"


_MODEL_DRAWERS = {
    "plain": _plain, "dynamic": _dynamic, "padded": _padded_model, "queue": _queue,
    "ordered": _ordered_model, "sequences": _sequences, "iterative": _iterative,
    "decoupled": _decoupled, "cached": _cached_model, "limited": _limited,
}  # fmt: skip
