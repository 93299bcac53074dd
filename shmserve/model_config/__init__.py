"""Model configuration (Triton's `config.pbtxt`): parsing, completion, validation, presentation.

A model's folder becomes a configuration in these steps:

    read_pbtxt / read_json     text -> ModelConfig, Source             (syntax, names, types)
    detect_backend             + name, backend, file name              (from the file names)
    normalise, validate        + defaults; is_complete=False           (rules that hold already)
    merge_autocomplete         + the fields that the model reports
    normalise, validate        + the server's defaults; is_complete=True  (all rules)
    ignored_fields, warnings_of, to_dict

source.py has the parser of text format and the lines of problems, json_source.py the parser of
JSON, message_builder.py the messages, completion.py the additions, and rules/ the rules.

The `Source` stores the position of every key and the values that could not be read. `validate` and
`merge_autocomplete` report all problems together, each with its line.
"""

from shmserve.model_config.completion import (
    ModelDefaults,
    detect_backend,
    merge_autocomplete,
    merge_duplicates,
    normalise,
    plugin_backends,
    unknown_backend_error,
)
from shmserve.model_config.message_builder import from_json, read_json, read_pbtxt, to_dict
from shmserve.model_config.rules import (
    LoadProblem,
    ignored_fields,
    read_labels,
    validate,
    warnings_of,
)
from shmserve.model_config.rules.ensembles import GraphProblem, compose
from shmserve.model_config.source import UNWRITTEN, Source
from shmserve.proto.model_config_pb2 import ModelConfig

__all__ = [
    "UNWRITTEN",
    "GraphProblem",
    "LoadProblem",
    "ModelConfig",
    "ModelDefaults",
    "Source",
    "compose",
    "detect_backend",
    "from_json",
    "ignored_fields",
    "merge_autocomplete",
    "merge_duplicates",
    "normalise",
    "plugin_backends",
    "read_json",
    "read_labels",
    "read_pbtxt",
    "to_dict",
    "unknown_backend_error",
    "validate",
    "warnings_of",
]
