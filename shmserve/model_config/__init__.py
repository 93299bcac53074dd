"""A model's configuration: read it, fill it in, check it, show it.

The order in which a model's folder becomes a configuration:

    parse_pbtxt / from_json    text -> ModelConfig                     (syntax, names, types)
    detect_backend             + name, backend, file name              (from the files there are)
    normalise, validate        + defaults; complete=False              (rules that hold already)
    merge_autocomplete         + what the model says about itself
    normalise, validate        + the server's defaults; complete=True  (all rules)
    unsupported, ignored_fields, to_dict, metadata
"""

from shmserve.model_config.autocomplete import merge_autocomplete
from shmserve.model_config.normalise import ModelDefaults, detect_backend, normalise
from shmserve.model_config.parse import from_json, parse_pbtxt
from shmserve.model_config.present import ignored_fields, metadata, to_dict, unsupported
from shmserve.model_config.validation import LoadProblem, validate
from shmserve.proto.model_config_pb2 import ModelConfig

__all__ = [
    "LoadProblem",
    "ModelConfig",
    "ModelDefaults",
    "detect_backend",
    "from_json",
    "ignored_fields",
    "merge_autocomplete",
    "metadata",
    "normalise",
    "parse_pbtxt",
    "to_dict",
    "unsupported",
    "validate",
]
