"""The names of models in OpenAI's API.

A model has the names of --served-model-name, its own name, and the `aliases` of its engine.yaml.
As in vLLM, requests may use any name, and responses contain the first.
"""

from __future__ import annotations

from collections.abc import Collection

from shmserve.errors import NotFound
from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.messages.control_requests import NameModels

# The input and the output by which a model that generates text is recognised.
PARAMETERS = "sampling_parameters"
TEXT = "text_output"


def generates(model: GatewayModel) -> bool:
    """Return whether a model has the input and the output of models that generate text."""
    signature = model.signature
    return PARAMETERS in signature.inputs and TEXT in signature.outputs


async def own_name(gateway: Gateway, name: str) -> str:
    """Return the own name of the model that has a name; unknown names are returned as they are.

    Raises:
        NotFound: The name stands for the only model that generates text, but there are several.
    """
    models = gateway.models
    if name in models:
        return name
    served = {each: model for model, each in reversed(gateway.settings.served_names)}
    own = served.get(name) or models.own_name(name)
    if own != name:
        return own
    asleep = await names_asleep(gateway)
    if name in served:
        return _only(gateway, name, asleep)
    return next((model for model, aliases in asleep.items() if name in aliases), name)


async def names_asleep(gateway: Gateway) -> dict[str, list[str]]:
    """Return the aliases of models on demand that generate text and are not loaded."""
    models = gateway.models
    if all(models.versions(name) for name in models.on_demand):
        return {}
    found: dict[str, list[str]] = (await gateway.supervisor.ask(NameModels))["names"]
    return {name: found[name] for name in sorted(found) if not models.versions(name)}


def _only(gateway: Gateway, name: str, asleep: Collection[str]) -> str:
    only = only_one(gateway, asleep)
    if not only:
        raise NotFound(
            f"'{name}' is a name of the only model that generates text, and there are none or "
            f"several (--served-model-name=MODEL={name} names one)"
        )
    return only


def only_one(gateway: Gateway, asleep: Collection[str] = ()) -> str:
    """Return the only model that generates text, or "" if there are none or several.

    Args:
        gateway: The gateway.
        asleep: The models on demand that generate text and are not loaded.
    """
    found = {model.name for model in gateway.models.all() if generates(model)}.union(asleep)
    return found.pop() if len(found) == 1 else ""


def names_of(gateway: Gateway, model: str, asleep: Collection[str] = ()) -> list[str]:
    """Return the names of a model, without its aliases; `asleep` as for `only_one`."""
    served = gateway.settings.served_names
    is_only = bool(served) and only_one(gateway, asleep) == model
    names = (each for named, each in served if named == model or (is_only and not named))
    return list(dict.fromkeys([*names, model]))


def shown_name(gateway: Gateway, model: str) -> str:
    """Return the name of a model in responses."""
    return names_of(gateway, model)[0] if gateway.settings.served_names else model
