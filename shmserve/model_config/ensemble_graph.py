"""Rules of an ensemble's graph, with the configurations of the models that its steps run.

Triton's (ensemble_utils.cc), in its words.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.proto.model_config_pb2 import ModelConfig


def compose(config: ModelConfig, models: Sequence[ModelConfig | None]) -> ModelConfig:
    """The final configuration of an ensemble, whose steps run these models (None: it does not
    serve).

    Raises InvalidArgument when they do not fit together.
    """
    full = ModelConfig()
    full.CopyFrom(config)
    if any(model is not None and model.model_transaction_policy.decoupled for model in models):
        full.model_transaction_policy.decoupled = True
    return full
