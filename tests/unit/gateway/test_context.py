"""The version that serves a request whose body took its time, while models come and go."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from shmserve.errors import NotFound, Unavailable
from shmserve.gateway.context import ModelTable
from shmserve.gateway.http.openai import model_names
from shmserve.gateway.http.openai.models import list_models
from shmserve.gateway.settings import GatewaySettings
from tests.rigs.gateway_rig import SIMPLE_CONFIG, publication


def make_publication(**fields: Any) -> Any:
    return publication({**SIMPLE_CONFIG, **fields}, MagicMock(endpoint="ipc:///nowhere"))


def test_a_resolved_model_is_current_until_it_is_replaced_or_withdrawn() -> None:
    models = ModelTable(MagicMock())
    models.publish(make_publication())
    resolved_model = models.resolve("simple", "")
    assert models.current(resolved_model) is resolved_model
    models.publish(make_publication())
    current_model = models.current(resolved_model)
    assert current_model is not resolved_model
    assert current_model is models.resolve("simple", "1")
    models.publish(make_publication(max_batch_size=3))
    with pytest.raises(Unavailable, match="was loaded with another configuration while"):
        models.current(resolved_model)
    models.withdraw("simple", "1")
    for copy in (resolved_model, current_model):
        with pytest.raises(Unavailable, match="version 1 is not at ready state"):
            models.current(copy)


def test_the_number_of_withdrawn_names_is_bounded() -> None:
    models = ModelTable(MagicMock())
    for number in range(5_000):
        models.withdraw(f"m{number}", "1")
    assert len(models._withdrawn_versions) == 4096
    with pytest.raises(Unavailable):  # a version that is cached
        models.resolve("m4999", "1")
    models.publish(make_publication())
    models.withdraw("simple", "1")
    models.publish(make_publication())
    assert "simple" not in models._withdrawn_versions


def test_readiness_keeps_prepared_schemas() -> None:
    """A worker that dies costs no gateway what it has prepared."""
    models = ModelTable(MagicMock())
    models.publish(make_publication())
    model = models.resolve("simple", "")
    for is_ready in (False, True):
        models.set_ready("simple", "1", is_ready)
        assert models.resolve("simple", "1") is model
        assert model.is_ready is is_ready
    models.set_ready("simple", "2", False)
    models.set_ready("other", "1", False)
    assert model.is_ready


def generator_publication(name: str, *aliases: str, **fields: Any) -> Any:
    engine = json.dumps({"max_model_len": 64, "aliases": aliases})
    text = {"data_type": "TYPE_STRING", "dims": [1]}
    return make_publication(
        name=name,
        max_batch_size=0,
        input=[{"name": model_names.PARAMETERS_INPUT, **text}],
        output=[{"name": model_names.TEXT_OUTPUT, **text}],
        **{"parameters": {"engine": {"string_value": engine}}, **fields},
    )


def test_any_model_is_published() -> None:
    """Without an acknowledgement of the gateway, no load would complete."""
    models = ModelTable(MagicMock(open=MagicMock(side_effect=Unavailable("no descriptor"))))
    models.publish(make_publication(parameters={"engine": {"string_value": "1"}}))
    assert models.resolve("simple", "").max_model_len is None


def build_table(*models: Any, served_names: tuple[tuple[str, str], ...] = ()) -> Any:
    table = ModelTable(MagicMock())
    for model in models:
        table.publish(model)
    payload = {"names": {"asleep": ["night"], "a": ["stale"]}}
    supervisor = SimpleNamespace(send_request=AsyncMock(return_value=payload))
    settings = GatewaySettings(served_names=served_names)
    return SimpleNamespace(models=table, settings=settings, supervisor=supervisor)


def resolve_alias(gateway: Any, name: str) -> str:
    return asyncio.run(model_names.resolve_alias(gateway, name))


def test_a_model_has_its_name_and_its_aliases() -> None:
    gateway = build_table(
        generator_publication("b", "gpt", "a", "both"),
        generator_publication("a", "both"),
        make_publication(),
    )
    resolved = {name: resolve_alias(gateway, name) for name in ("gpt", "a", "b", "both", "nobody")}
    assert resolved == {"gpt": "b", "a": "a", "b": "b", "both": "a", "nobody": "nobody"}
    assert gateway.models.resolve("a", "").max_model_len == 64
    assert gateway.models.resolve("simple", "").max_model_len is None
    assert model_names.response_name(gateway, "b") == "b"
    gateway.models.withdraw("b", "1")
    assert resolve_alias(gateway, "gpt") == "gpt"


def test_adapters_of_vllm_are_further_names_of_their_model() -> None:
    parameters = {"max_model_len": "64", "adapters": "french\norg/x\nb"}
    strings = {name: {"string_value": text} for name, text in parameters.items()}
    vllm_model = generator_publication("a", backend="vllm", parameters=strings)
    gateway = build_table(vllm_model, generator_publication("b"), make_publication())
    model = gateway.models.resolve("a", "")
    assert model.adapters == ["french", "org/x", "b"]
    for name, owner, adapter in (
        ("french", "a", "french"),
        ("org/x", "a", "org/x"),
        ("a", "a", ""),
    ):
        assert resolve_alias(gateway, name) == owner
        assert model_names.find_adapter(gateway, model, name) == adapter
    assert resolve_alias(gateway, "b") == "b"
    (listed,) = asyncio.run(list_models(gateway, MagicMock())).pieces
    parents = {
        card["id"]: (card["root"], card["parent"]) for card in json.loads(bytes(listed))["data"]
    }
    assert parents == {
        "a": ("a", None),
        "french": ("a", "a"),
        "org/x": ("a", "a"),
        "b": ("b", None),
    }


def test_served_names_precede_a_models_own() -> None:
    gateway = build_table(
        generator_publication("a"),
        make_publication(),
        served_names=(("", "gpt"), ("a", "org/x"), ("b", "y")),
    )
    for name, owner in (("gpt", "a"), ("org/x", "a"), ("a", "a"), ("y", "b"), ("simple", "simple")):
        assert resolve_alias(gateway, name) == owner
    assert model_names.model_names(gateway, "a") == ["gpt", "org/x", "a"]
    assert model_names.response_name(gateway, "a") == "gpt"
    assert model_names.model_names(gateway, "simple") == ["simple"]
    gateway.models.publish(generator_publication("b"))
    assert model_names.model_names(gateway, "a") == ["org/x", "a"]
    with pytest.raises(NotFound, match="--served-model-name=MODEL=gpt"):
        resolve_alias(gateway, "gpt")


def test_a_model_on_demand_has_its_aliases_before_it_is_loaded() -> None:
    t = build_table(generator_publication("a", "gpt"), served_names=(("", "only"), ("asleep", "z")))
    send_request = t.supervisor.send_request
    assert resolve_alias(t, "night") == "night" and not send_request.called
    t.models.on_demand_names |= {"asleep", "a"}
    for name, model_name in (("gpt", "a"), ("asleep", "asleep"), ("z", "asleep")):
        assert resolve_alias(t, name) == model_name and not send_request.called
    assert resolve_alias(t, "night") == "asleep"
    assert resolve_alias(t, "stale") == "stale"  # "a" is loaded, and has no such alias
    with pytest.raises(NotFound, match="none or several"):
        resolve_alias(t, "only")
    send_request.return_value = {"names": {}}
    assert resolve_alias(t, "only") == "a"
