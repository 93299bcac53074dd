"""What the routes take and give, as JSON Schema has it: an `Operation` for each, named in the table
of routes; and the schemas that several of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmserve.logs import FORMATS, MOST_VERBOSE

Schema = Mapping[str, Any]
JSON = "application/json"
BINARY = "application/octet-stream"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation: a sentence on it, and schemas by content type. No `body`: none is read; no
    `reply`: an empty one. `needs_body`: an empty body is refused."""

    about: str
    body: Mapping[str, Schema] | None = None
    reply: Mapping[str, Schema] | None = None
    needs_body: bool = False


def _object(required: str = "", /, **properties: Schema) -> Schema:
    """An object that may have more than these."""
    made = {"type": "object", "properties": properties}
    return {**made, "required": required.split()} if required else made


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _shared(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Mapping[str, Schema]:
    return {JSON: schema}


_TEXT: Schema = {"type": "string"}
_TRUTH: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ANY: Schema = {"type": "object"}
_DATATYPE: Schema = {
    "type": "string",
    "enum": [
        *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
        *("FP16", "FP32", "FP64", "BF16", "BYTES"),
    ],
}
_PARAMETERS: Schema = {
    "type": "object",
    "additionalProperties": {"type": ["string", "integer", "number", "boolean"]},
}
_SHAPE = _array({"type": "integer"})
_DATA: Schema = {"type": "array", "description": "flat, or nested as the shape says"}
_BINARY: Schema = {
    "type": "string",
    "format": "binary",
    "description": "the JSON, then the bytes of the tensors with a binary_data_size, in their "
    "order; the header Inference-Header-Content-Length is the size of the JSON",
}
_MANY = _array(_shared("Tensor"))
_DATED = {"created": _COUNT, "model": _TEXT, "object": _TEXT}

COMPONENTS: Mapping[str, Schema] = {
    "Error": _object("error", error=_TEXT),
    "OpenAIError": _object("error", error=_object("message type", message=_TEXT, type=_TEXT)),
    "Tensor": _object(
        "name datatype shape",
        name=_TEXT,
        datatype=_DATATYPE,
        shape=_SHAPE,
        data=_DATA,
        parameters=_PARAMETERS,
    ),
    "Asked": _object("name", name=_TEXT, parameters=_PARAMETERS),
    "Request": _object(
        "inputs",
        id=_TEXT,
        parameters=_PARAMETERS,
        inputs=_MANY,
        outputs=_array(_shared("Asked")),
    ),
    "Response": _object(
        "model_name model_version outputs",
        model_name=_TEXT,
        model_version=_TEXT,
        id=_TEXT,
        outputs=_MANY,
        parameters=_PARAMETERS,
    ),
    "Server": _object(
        "name version extensions", name=_TEXT, version=_TEXT, extensions=_array(_TEXT)
    ),
    "Metadata": _object("name datatype shape", name=_TEXT, datatype=_DATATYPE, shape=_SHAPE),
    "Model": _object(
        "name versions platform inputs outputs",
        name=_TEXT,
        versions=_array(_TEXT),
        platform=_TEXT,
        **{name: _array(_shared("Metadata")) for name in ("inputs", "outputs")},
    ),
    "Config": _object(
        "name max_batch_size input output",
        name=_TEXT,
        max_batch_size=_COUNT,
        input=_array(_ANY),
        output=_array(_ANY),
    ),
    "Statistics": _object("model_stats", model_stats=_array(_object("name version", name=_TEXT))),
    "Logging": _object(
        **{f"log_{name}": _TRUTH for name in ("info", "warning", "error")},
        log_verbose_level={"type": "integer", "minimum": 0, "maximum": MOST_VERBOSE},
        log_format={"type": "string", "enum": list(FORMATS)},
    ),
    "Tracing": _object(
        "trace_level",
        trace_level=_array(_TEXT),
        **{f"trace_{name}": _TEXT for name in ("rate", "count", "file", "mode")},
        log_frequency=_TEXT,
    ),
    "Indexed": _object("name", name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT),
    "Region": _object("name byte_size", name=_TEXT, byte_size=_COUNT),
    "Listed": _object("id object", id=_TEXT, object=_TEXT, created=_COUNT, owned_by=_TEXT),
}

_GENERATED = _object("model_name", model_name=_TEXT, model_version=_TEXT)
_BY_NAMES: Schema = {
    "type": "object",
    "description": "the inputs by name, each a value or an array; what is no input is a parameter",
}
_TRACE_CHANGES = _object(
    trace_level=_array({"type": "string", "enum": ["OFF", "TIMESTAMPS"]}),
    **dict.fromkeys(("trace_rate", "trace_count", "log_frequency"), _TEXT),
)
_CONFIG: Schema = {"type": "string", "description": "the configuration, as JSON in a string"}
_LOAD = _object(
    parameters={
        "type": "object",
        "properties": {"config": _CONFIG},
        "patternProperties": {"^file:": {"type": "string", "contentEncoding": "base64"}},
        "additionalProperties": False,
    }
)
_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "stream": _TRUTH,
}
_MESSAGE = _object("role content", role=_TEXT, content=_TEXT)
_CHOICES = {JSON: _object("id choices", id=_TEXT, choices=_array(_ANY), **_DATED), EVENTS: _TEXT}
_TEXTS: Schema = {"anyOf": [_TEXT, _array(_TEXT)]}

LIVE = Operation("Whether the server runs: 200.")
READY = Operation("Whether every model is ready: 200.")
MODEL_READY = Operation("Whether the model is ready: 200.")
SERVER = Operation("The server: its name, version and extensions.", None, _json(_shared("Server")))
MODEL = Operation("A model: its inputs and outputs.", None, _json(_shared("Model")))
CONFIG = Operation("A model's configuration as it is in force.", None, _json(_shared("Config")))
STATISTICS = Operation("Counters and times.", None, _json(_shared("Statistics")))
INFER = Operation(
    "Ask a model.",
    {JSON: _shared("Request"), BINARY: _BINARY},
    {JSON: _shared("Response"), BINARY: _BINARY},
    needs_body=True,
)
GENERATE = Operation("Ask a model, by names.", _json(_BY_NAMES), _json(_GENERATED), needs_body=True)
GENERATE_STREAM = Operation(
    "Ask a model; its responses are events.", _json(_BY_NAMES), {EVENTS: _TEXT}, needs_body=True
)
SHOW_TRACE = Operation("The trace settings.", None, _json(_shared("Tracing")))
CHANGE_TRACE = Operation(
    "Change trace settings; null: as before.",
    _json(_TRACE_CHANGES),
    _json(_shared("Tracing")),
    needs_body=True,
)
LOGGING = Operation("The log settings.", None, _json(_shared("Logging")))
LOG = Operation(
    "Change log settings.", _json(_shared("Logging")), _json(_shared("Logging")), needs_body=True
)
INDEX = Operation(
    "All models, and their states.",
    _json(_object(ready=_TRUTH)),
    _json(_array(_shared("Indexed"))),
)
LOAD = Operation("Load a model, or load it again; with a configuration, files.", _json(_LOAD))
UNLOAD = Operation("Unload a model.", _json(_object(parameters=_object(unload_dependents=_TRUTH))))
REGISTER = Operation(
    "Register a region of shared memory.",
    _json(
        _object(
            "key byte_size",
            key=_TEXT,
            offset=_COUNT,
            byte_size=_COUNT,
            pin=_TRUTH,
            lifetime={"type": "string", "enum": ["server", "connection"]},
        )
    ),
    needs_body=True,
)
REGISTER_CUDA = Operation(
    "Register a region of a CUDA device's memory.",
    _json(
        _object(
            "raw_handle device_id byte_size",
            raw_handle=_object("b64", b64={"type": "string", "contentEncoding": "base64"}),
            device_id=_COUNT,
            byte_size=_COUNT,
            offset=_COUNT,
            device_uuid=_TEXT,
        )
    ),
    needs_body=True,
)
REGIONS = Operation("Regions that are registered.", None, _json(_array(_shared("Region"))))
UNREGISTER = Operation("Unregister a region, or all of them.")
MODELS = Operation(
    "The models that generate text or embed it.",
    None,
    _json(_object("object data", object=_TEXT, data=_array(_shared("Listed")))),
)
ONE_MODEL = Operation("One of them.", None, _json(_shared("Listed")))
COMPLETIONS = Operation(
    "Continue a prompt.",
    _json(_object("model prompt", prompt=_TEXTS, **_SAMPLING)),
    _CHOICES,
    needs_body=True,
)
CHATS = Operation(
    "Continue a chat.",
    _json(_object("model messages", messages=_array(_MESSAGE), **_SAMPLING)),
    _CHOICES,
    needs_body=True,
)
EMBEDDINGS = Operation(
    "A vector for each text.",
    _json(_object("model input", model=_TEXT, input=_TEXTS)),
    _json(_object("object data model", data=_array(_ANY), object=_TEXT, model=_TEXT)),
    needs_body=True,
)
DESCRIPTION = Operation("This description.", None, _json(_ANY))
PAGE = Operation("This description, to be read.", None, {"text/html": _TEXT})
