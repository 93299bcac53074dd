"""The names of models in OpenAI's API, and the model that a name stands for.

A model has the names of --served-model-name, its own name, and the `aliases` of its engine.yaml.
As in vLLM, requests may use any of these names, and responses contain the first one. The name of a
LoRA adapter stands for the model with this adapter, and responses contain it.
"""

from __future__ import annotations

from collections.abc import Collection

from shmserve.errors import NotFound
from shmserve.gateway.context import Gateway, GatewayModel
from shmserve.ipc.messages.control_requests import NameModels

# The input and the output by which a model that generates text is recognised.
PARAMETERS_INPUT = "sampling_parameters"
TEXT_OUTPUT = "text_output"


def generates_text(model: GatewayModel) -> bool:
    """Return whether a model generates text, which its inputs and outputs show."""
    signature = model.signature
    return PARAMETERS_INPUT in signature.inputs and TEXT_OUTPUT in signature.outputs


async def resolve_alias(gateway: Gateway, name: str) -> str:
    """Return the name of the model that an alias stands for; return other names unchanged.

    Raises:
        NotFound: The name stands for the only generative model, but there are none or several.
    """
    models = gateway.models
    if name in models:
        return name
    served_names = gateway.settings.served_names
    models_by_name = {served_name: model for model, served_name in reversed(served_names)}
    model_name = models_by_name.get(name) or models.resolve_alias(name)
    if model_name != name:
        return model_name
    unloaded_models = await unloaded_aliases(gateway)
    if name in models_by_name:
        return _only_model(gateway, name, unloaded_models)
    return next((model for model, aliases in unloaded_models.items() if name in aliases), name)


async def unloaded_aliases(gateway: Gateway) -> dict[str, list[str]]:
    """Return the aliases of each on-demand model that generates text and is not loaded."""
    models = gateway.models
    if all(models.versions(name) for name in models.on_demand_names):
        return {}
    aliases: dict[str, list[str]] = (await gateway.supervisor.send_request(NameModels))["names"]
    return {name: aliases[name] for name in sorted(aliases) if not models.versions(name)}


def _only_model(gateway: Gateway, name: str, unloaded_models: Collection[str]) -> str:
    only_model = only_generative_model(gateway, unloaded_models)
    if not only_model:
        raise NotFound(
            f"'{name}' requires exactly one model that generates text, but there are none or "
            f"several; set --served-model-name=MODEL={name}"
        )
    return only_model


def only_generative_model(gateway: Gateway, unloaded_models: Collection[str] = ()) -> str:
    """Return the only model that generates text, or "" if there are none or several.

    Args:
        gateway: The gateway.
        unloaded_models: The models on demand that generate text and are not loaded.
    """
    loaded_models = {model.name for model in gateway.models.all_versions() if generates_text(model)}
    candidates = loaded_models.union(unloaded_models)
    return candidates.pop() if len(candidates) == 1 else ""


def model_names(gateway: Gateway, model: str, unloaded_models: Collection[str] = ()) -> list[str]:
    """Return the names of a model without its aliases, the name for responses first.

    Args:
        gateway: The gateway.
        model: The name of the model's folder.
        unloaded_models: The models on demand that generate text and are not loaded.
    """
    served_names = gateway.settings.served_names
    is_only = bool(served_names) and only_generative_model(gateway, unloaded_models) == model
    names = (
        name
        for named_model, name in served_names
        if named_model == model or (is_only and not named_model)
    )
    return list(dict.fromkeys([*names, model]))


def find_adapter(gateway: Gateway, model: GatewayModel, name: str) -> str:
    """Return the LoRA adapter that a name of `model` stands for; "" if it has no such adapter."""
    is_adapter = name in model.adapters and name not in model_names(gateway, model.name)
    return name if is_adapter else ""


def response_name(gateway: Gateway, model: str) -> str:
    """Return the name that responses contain for `model`, the name of a model's folder."""
    return model_names(gateway, model)[0] if gateway.settings.served_names else model
