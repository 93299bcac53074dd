"""Model configuration (Triton's `config.pbtxt`): parsed, auto-completed, validated, presented.

The order in which a model's folder becomes a configuration:

    read_pbtxt / read_json     text -> ModelConfig, Source             (syntax, names, types)
    detect_backend             + name, backend, file name              (from the files there are)
    normalise, validate        + defaults; complete=False              (rules that hold already)
    merge_autocomplete         + what the model says about itself
    normalise, validate        + the server's defaults; complete=True  (all rules)
    ignored_fields, doubts, to_dict

The Source remembers where everything was written and what could not be read: `validate` and
`merge_autocomplete` name the line, and tell all mistakes at once.
"""

from shmserve.model_config.completion import (
    ModelDefaults,
    detect_backend,
    merge_autocomplete,
    normalise,
)
from shmserve.model_config.diagnostics import UNWRITTEN, Source
from shmserve.model_config.parse import class_source, from_json, parse_pbtxt, read_json, read_pbtxt
from shmserve.model_config.rules import LoadProblem, doubts, ignored_fields, read_labels, validate
from shmserve.model_config.rules.ensembles import GraphProblem, compose
from shmserve.model_config.syntax.json_format import to_dict
from shmserve.proto.model_config_pb2 import ModelConfig

__all__ = [
    "UNWRITTEN",
    "GraphProblem",
    "LoadProblem",
    "ModelConfig",
    "ModelDefaults",
    "Source",
    "class_source",
    "compose",
    "detect_backend",
    "doubts",
    "from_json",
    "ignored_fields",
    "merge_autocomplete",
    "normalise",
    "parse_pbtxt",
    "read_json",
    "read_labels",
    "read_pbtxt",
    "to_dict",
    "validate",
]
