"""The management operations of all protocols, without inference and shared memory.

These operations cover health, metadata and configurations, log and trace settings, the model
repository, and statistics. The supervisor stores the log and trace settings and performs the
operations on the repository. It completes an operation even if the client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import shmserve
from shmserve.common.names import check_model_name, is_traversal
from shmserve.common.trace_settings import read_changes
from shmserve.errors import (
    InvalidArgument,
    PermissionDenied,
    ShmserveError,
    Unavailable,
    Unsupported,
)
from shmserve.gateway.context import Gateway, GatewayModel, canonical_version, resolve_model
from shmserve.gateway.listener import ClientIdentity
from shmserve.ipc.messages.control_requests import (
    AskReady,
    ChangeLogging,
    ChangeTracing,
    IndexRepository,
    LoadModel,
    UnloadModel,
)
from shmserve.ipc.model_spec import TensorSpec
from shmserve.ipc.tensors.datatypes import ITEM_SIZE

logger = logging.getLogger(__name__)

# Statistics omit the reports of schedulers that respond later than this.
_REPORT_TIMEOUT_S = 2.0
_EMPTY_TEXT_BYTES = 4  # bytes of an empty text: its length prefix
_MAX_EXAMPLE_ELEMENTS = 64  # elements of an input in an example

EXTENSIONS = (
    *("classification", "sequence", "model_repository", "model_repository(unload_dependents)"),
    *("schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory"),
    *("binary_tensor_data", "parameters", "statistics", "trace", "logging"),
)


def check_not_exiting(gateway: Gateway) -> None:
    """Raise Unavailable if the server exits without a successor."""
    if gateway.health.exiting:
        raise Unavailable("Server exiting")


async def is_model_ready(gateway: Gateway, name: str, version: str) -> bool:
    """Return whether a model's version is ready.

    A model on demand is ready even if it is not loaded. A loaded model that defines `is_ready` is
    ready if its `is_ready` returns true.

    Raises:
        InvalidArgument: `version` is not a version.
    """
    if name in gateway.models.on_demand_names and not gateway.models.versions(name):
        return True
    try:
        model = gateway.models.resolve(name, version)
        if not (model.is_ready and model.has_ready_check):
            return model.is_ready
        reply = await gateway.supervisor.send_request(AskReady, model.name, model.version)
        return bool(reply["ready"])
    except InvalidArgument:
        raise
    except ShmserveError:
        return False


def server_metadata(gateway: Gateway) -> dict[str, Any]:
    """Return the server's metadata: its name, version and extensions."""
    return {"name": gateway.settings.id, "version": shmserve.__version__, "extensions": EXTENSIONS}


async def model_metadata(gateway: Gateway, name: str, version: str) -> dict[str, Any]:
    """Return a model's metadata, with all versions or with the requested `version` only.

    Raises:
        ShmserveError: `resolve_model` does not find the model, or cannot load it.
    """
    model = await resolve_model(gateway, name, version)
    metadata = model.metadata
    return {
        "name": model.name,
        "versions": [model.version] if version else gateway.models.versions(name),
        "platform": metadata.get("platform", ""),
        "inputs": metadata.get("inputs", []),
        "outputs": metadata.get("outputs", []),
    }


def request_examples(gateway: Gateway) -> list[dict[str, Any]]:
    """Return a request to try for each model: its path, headers and body.

    An input of many elements has `fill`, a value, and `count` in place of `data`. Tensors that JSON
    cannot express are binary: `zeros` bytes follow the body. For a model on demand that is not
    loaded, the request is one that loads it, without a body.
    """
    models = gateway.models
    names = sorted({*models.on_demand_names, *(model.name for model in models.all_versions())})
    return [example for name in names for example in _model_examples(name, models.find(name, ""))]


def text_example(model: str, path: str, **fields: Any) -> dict[str, Any]:
    """Return a request of OpenAI's API, as `request_examples` returns requests."""
    return {"model": model, "path": path, "headers": {}, "body": {"model": model, **fields}}


def _model_examples(name: str, model: GatewayModel | None) -> list[dict[str, Any]]:
    path = f"/v2/models/{quote(name, safe='')}"
    if model is None:
        return [{"model": name, "path": path, "headers": {}}]
    if model.has_task_parameter:
        messages = [{"role": "user", "content": "Tell me a story."}]
        completion = text_example(name, "/v1/completions", prompt="Once upon a time", max_tokens=16)
        return [
            completion,
            text_example(name, "/v1/chat/completions", messages=messages, max_tokens=16),
        ]
    signature = model.signature
    required_inputs = [spec for spec in signature.inputs.values() if not spec.optional]
    datatypes = {spec.datatype for spec in (*required_inputs, *signature.outputs.values())}
    is_binary = not datatypes.isdisjoint(("FP16", "BF16"))
    inputs = [_example_input(item, signature.max_batch_size, is_binary) for item in required_inputs]
    parameters: dict[str, Any] = {"binary_data_output": True} if is_binary else {}
    if model.is_stateful:
        parameters |= {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    body = {"inputs": inputs, **({"parameters": parameters} if parameters else {})}
    zero_bytes = sum(item["parameters"]["binary_data_size"] for item in inputs) if is_binary else 0
    headers = {"Accept": "application/x-ndjson"} if model.decoupled else {}
    example = {"model": name, "path": f"{path}/infer", "headers": headers, "body": body}
    return [example | ({"zeros": zero_bytes} if is_binary else {})]


def _example_input(spec: TensorSpec, max_batch_size: int, is_binary: bool) -> dict[str, Any]:
    shape = [*([1] if max_batch_size else []), *(abs(dim) for dim in spec.dims)]
    element = {"BYTES": "text", "BOOL": True}.get(spec.datatype, 1)
    count = math.prod(shape)
    data: dict[str, Any] = {"data": [element] * min(count, _MAX_EXAMPLE_ELEMENTS)}
    if is_binary:
        size = ITEM_SIZE[spec.datatype] or _EMPTY_TEXT_BYTES
        data = {"parameters": {"binary_data_size": size * count}}
    elif count > _MAX_EXAMPLE_ELEMENTS:
        data = {"fill": element, "count": count}
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape, **data}


async def model_config(gateway: Gateway, name: str, version: str) -> dict[str, Any]:
    """Return a model's configuration; errors are raised by `resolve_model`."""
    return (await resolve_model(gateway, name, version)).config


LOG_SWITCHES = ("log_info", "log_warning", "log_error")
LOG_LEVEL, LOG_FORMAT, LOG_FILE = "log_verbose_level", "log_format", "log_file"


async def change_log_settings(gateway: Gateway, new_settings: dict[str, Any]) -> dict[str, Any]:
    """Change log settings, and return all log settings in Triton's order."""
    return await gateway.supervisor.send_request(ChangeLogging, new_settings)


def log_file_error() -> Unsupported:
    """Return the error for an attempt to change the log file."""
    return Unsupported("log file location can not be updated through network protocol")


async def change_trace_settings(
    gateway: Gateway, model: str, changes: Mapping[str, Sequence[str] | None]
) -> dict[str, list[str]]:
    """Change trace settings, and return all trace settings as texts.

    Raises:
        InvalidArgument: There is no such model, or a value is not allowed.
        Unsupported: A setting cannot be changed.
    """
    if model and not gateway.models.versions(model):
        raise InvalidArgument(f"Request for unknown model : {model}")
    return await gateway.supervisor.send_request(ChangeTracing, model, read_changes(changes))


# --- the model repository


async def repository_index(gateway: Gateway, *, only_ready: bool) -> list[dict[str, Any]]:
    """Return every version of every model in the repositories, or only ready versions."""
    gateway.models.check_server_live()
    payload = await gateway.supervisor.send_request(IndexRepository, only_ready)
    return list(payload.get("models", []))


async def load_model(
    gateway: Gateway, client: ClientIdentity, name: str, config: str, files: dict[str, Any]
) -> None:
    """Load a model, optionally with the client's configuration and files, and wait for it.

    Raises:
        PermissionDenied: The client may not send a configuration or files.
        ShmserveError: The load failed.
    """
    # Models run with the rights of the server's user. Only this user, or a client with a token, may
    # therefore send their configuration and files.
    if (config or files) and not (
        client.listener.authorisation.requires_token or client.runs_the_server()
    ):
        raise PermissionDenied(
            "the configuration or files of a model are accepted only from the user who runs the "
            "server, or with a token (--auth-token-file)"
        )
    await gateway.supervisor.send_request(LoadModel, name, config, files)


async def unload_model(gateway: Gateway, name: str, *, with_dependents: bool) -> None:
    """Unload a model and, with `with_dependents`, the models that only this model needs."""
    await gateway.supervisor.send_request(UnloadModel, name, with_dependents)


def check_names(repository: str, name: str, *, for_unload: bool = False) -> None:
    """Check the names of a repository and of a model.

    With `for_unload`, a name with path traversal is an unknown model, as in Triton.

    Raises:
        Unsupported: A repository is named, which Triton does not support either.
        InvalidArgument: The name is not a valid name of a model.
    """
    check_repository(repository)
    if not (for_unload and is_traversal(name)):
        check_model_name(name)


def check_repository(repository: str) -> None:
    """Raise Unsupported if a repository is named."""
    if repository:
        raise Unsupported("'repository_name' specification is not supported")


# --- statistics


async def model_statistics(gateway: Gateway, name: str, version: str) -> list[dict[str, Any]]:
    """Return Triton's statistics of one version, of all versions ("") or of all models (no name).

    Raises:
        InvalidArgument: There is no such model or version.
        Unavailable: No scheduler of the model has reported in time.
    """
    if not name:
        return _triton_statistics(await collect_reports(gateway, gateway.models.all_versions()))
    version = canonical_version(version) if version else ""
    versions = gateway.models.versions(name)
    if not versions:
        raise InvalidArgument(f"requested model '{name}' is not available")
    try:
        models = [gateway.models.resolve(name, v) for v in ([version] if version else versions)]
    except ShmserveError:
        text = f"requested model version is not available for model '{name}'"
        raise InvalidArgument(text) from None
    reports = await collect_reports(gateway, models)
    if not reports:
        raise Unavailable(f"the statistics of model '{name}' are not available now; try again")
    return _triton_statistics(reports)


def _triton_statistics(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: report[key] for key in report if key != "shmserve"} for report in reports]


async def collect_reports(
    gateway: Gateway, models: list[GatewayModel], log_level: int = logging.WARNING
) -> list[dict[str, Any]]:
    """Return the statistics reports of the schedulers of `models`, in order.

    Late reports are omitted and logged at `log_level`.
    """
    futures = [gateway.schedulers.request_statistics(model.endpoint) for model in models]
    if not futures:
        return []
    try:
        await asyncio.wait(futures, timeout=_REPORT_TIMEOUT_S)
    finally:
        missing_reports = [future for future in futures if not future.done()]
        for future in missing_reports:
            future.cancel()
    if missing_reports:
        names = ", ".join(
            f"'{model.name}' version {model.version}"
            for model, future in zip(models, futures, strict=True)
            if future in missing_reports
        )
        logger.log(log_level, "the schedulers of these models did not report statistics: %s", names)
    return [
        future.result()
        for future in futures
        if not future.cancelled() and future.exception() is None
    ]
