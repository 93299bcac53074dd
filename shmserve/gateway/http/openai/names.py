"""The names of models in OpenAI's API.

A model has the names of --served-model-name, its own name, and the `aliases` of its engine.yaml.
As in vLLM, requests may use any name, and responses contain the first.
"""

from __future__ import annotations

from shmserve.errors import NotFound
from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import GatewayModel

# The input and the output by which a model that generates text is recognised.
PARAMETERS = "sampling_parameters"
TEXT = "text_output"


def generates(model: GatewayModel) -> bool:
    """Return whether a model has the input and the output of models that generate text."""
    signature = model.signature
    return PARAMETERS in signature.inputs and TEXT in signature.outputs


def own_name(gateway: Gateway, name: str) -> str:
    """Return the own name of the model that has a name; unknown names are returned as they are.

    Raises:
        NotFound: The name stands for the only model that generates text, but there are several.
    """
    own = gateway.models.own_name(name)
    served = gateway.settings.served_names
    if own != name or not served or name in gateway.models:
        return own
    for model, each in served:
        if each == name:
            return model or _only(gateway, name)
    return own


def _only(gateway: Gateway, name: str) -> str:
    only = only_one(gateway)
    if not only:
        raise NotFound(
            f"'{name}' is a name of the only model that generates text, and there are none or "
            f"several (--served-model-name=MODEL={name} names one)"
        )
    return only


def only_one(gateway: Gateway) -> str:
    """Return the only model that generates text, or "" if there are none or several."""
    models = gateway.models
    found = {model.name for model in models.all() if generates(model)}
    found |= {name for name in models.on_demand if not models.versions(name)}
    return found.pop() if len(found) == 1 else ""


def names_of(gateway: Gateway, model: str) -> list[str]:
    """Return the names of a model, without its aliases."""
    served = gateway.settings.served_names
    is_only = bool(served) and only_one(gateway) == model
    names = (each for named, each in served if named == model or (is_only and not named))
    return list(dict.fromkeys([*names, model]))


def shown_name(gateway: Gateway, model: str) -> str:
    """Return the name of a model in responses."""
    return names_of(gateway, model)[0] if gateway.settings.served_names else model
