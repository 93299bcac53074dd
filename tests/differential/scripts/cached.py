"""The response cache."""

from tests.differential.script import Drain, Group, Known, Model, Script, Send, recorder
from tests.differential.scripts.ensembles import (
    RETURN_FAILURE,
    RETURN_INCREMENT,
    ensemble,
    one_by_one,
    step_through,
)

CACHE = "response_cache { enable: true }"


def cached_recorder(name: str, settings: str = "", method_body: str = "") -> Model:
    return recorder(name, CACHE + settings, method_body=method_body)


def cached_ensemble() -> Script:
    """An ensemble with a cached response skips its steps."""
    name = "cached_ensemble"
    ensemble_model = ensemble(name, step_through(f"{name}_1", "INPUT0", "OUT"))
    models = [
        recorder(f"{name}_1", method_body=RETURN_INCREMENT),
        Model(name, ensemble_model.config + CACHE),
    ]
    known = [Known("responses.b.parameters", "a hit has its sequence, as the miss had")]
    return Script(name, models, one_by_one(Send("a", name, 1), Send("b", name, 1)), known)


SCRIPTS = [
    Script("hits_and_misses", [cached_recorder("hits_and_misses", method_body=RETURN_INCREMENT)],
        one_by_one(Send("a", "hits_and_misses", 1), Send("b", "hits_and_misses", 1),
        Send("c", "hits_and_misses", 2), Send("d", "hits_and_misses", 1, rows=2),
        Send("e", "hits_and_misses", 1, rows=2))),
    Script("hits_of_a_batcher", [cached_recorder("hits_of_a_batcher", "dynamic_batching { }")],
        one_by_one(Send("a", "hits_of_a_batcher", 1), Send("b", "hits_of_a_batcher", 1))),
    Script("other_shapes_of_the_same_bytes", [cached_recorder("other_shapes_of_the_same_bytes")],
        one_by_one(Send("a", "other_shapes_of_the_same_bytes", 1, rows=2),
        Send("b", "other_shapes_of_the_same_bytes", 1, columns=2)),
        known_differences=[Known("*", "the key has the shapes, too")]),
    Script("failures_are_not_kept",
        [cached_recorder("failures_are_not_kept", method_body=RETURN_FAILURE)],
        one_by_one(Send("a", "failures_are_not_kept", 1), Send("b", "failures_are_not_kept", 1)),
        known_differences=[Known("*", "Triton 2.51 keeps an error as a response without outputs")]),
    Script("not_cached", [recorder("not_cached")], [Send("a", "not_cached", 1), Drain()]),
    cached_ensemble(),
]  # fmt: skip
GROUP = Group("cached", SCRIPTS, flags=["--cache-config=local,size=1048576"])
