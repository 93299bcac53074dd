"""Health, metadata, configuration and statistics: what a gateway answers from what it knows."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import shmserve
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.request import Request
from shmserve.gateway.http.response import JSON, Reply, error_reply, json_reply
from shmserve.gateway.model_table import Model, describe, whole_version

logger = logging.getLogger(__name__)

EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "logging",
)

# A scheduler that does not answer by then (it is stopped, or gone) is left out.
_REPORT_S = 2.0


async def live(gateway: Gateway, request: Request) -> Reply:
    """GET /v2/health/live."""
    if gateway.health.exiting or gateway.draining:
        return error_reply(503, "Server exiting")
    return Reply(200 if gateway.health.live else 400)


async def ready(gateway: Gateway, request: Request) -> Reply:
    """GET /v2/health/ready."""
    if gateway.health.exiting or gateway.draining:
        return error_reply(503, "Server exiting")
    return Reply(200 if gateway.health.ready else 400)


async def server(gateway: Gateway, request: Request) -> Reply:
    """GET /v2."""
    return json_reply(
        {"name": gateway.settings.id, "version": shmserve.__version__, "extensions": EXTENSIONS}
    )


async def model(gateway: Gateway, request: Request, name: str, version: str | None) -> Reply:
    """GET /v2/models/NAME; a version in the URL is the only one listed."""
    found = gateway.models.resolve(name, version or "")
    versions = [found.version] if version else gateway.models.versions(name)
    return json_reply(describe(found, versions))


async def model_config(gateway: Gateway, request: Request, name: str, version: str | None) -> Reply:
    """GET /v2/models/NAME/config."""
    return Reply(200, (gateway.models.resolve(name, version or "").config,), JSON)


async def model_ready(gateway: Gateway, request: Request, name: str, version: str | None) -> Reply:
    """GET /v2/models/NAME/ready."""
    if is_ready(gateway, name, version or ""):
        return Reply()
    return error_reply(400, "Model version not ready")


def is_ready(gateway: Gateway, name: str, version: str) -> bool:
    """Whether a model's version is ready; raises InvalidArgument for what is no version."""
    try:
        return gateway.models.resolve(name, version).ready
    except InvalidArgument:
        raise
    except ShmserveError:
        return False


async def statistics(gateway: Gateway, request: Request) -> Reply:
    """GET /v2/models/stats."""
    return json_reply({"model_stats": await reported(gateway, "", "")})


async def model_statistics(
    gateway: Gateway, request: Request, name: str, version: str | None
) -> Reply:
    """GET /v2/models/NAME/stats."""
    return json_reply({"model_stats": await reported(gateway, name, version or "")})


async def reported(gateway: Gateway, name: str, version: str) -> list[dict[str, Any]]:
    """The statistics, as Triton has them, of a model's version, of all its versions for "", of all
    models without name.

    Raises InvalidArgument or Unavailable.
    """
    if not name:
        return _as_tritons(await collect(gateway, gateway.models.all()))
    version = whole_version(version) if version else ""
    versions = gateway.models.versions(name)
    if not versions:
        raise InvalidArgument(f"requested model '{name}' is not available")
    try:
        chosen = [gateway.models.resolve(name, version or v) for v in versions]
    except ShmserveError:
        raise InvalidArgument(
            f"requested model version is not available for model '{name}'"
        ) from None
    reports = await collect(gateway, chosen[:1] if version else chosen)
    if not reports:
        raise Unavailable(f"the statistics of model '{name}' are not available now")
    return _as_tritons(reports)


def _as_tritons(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: report[key] for key in report if key != "shmserve"} for report in reports]


async def collect(gateway: Gateway, models: list[Model]) -> list[dict[str, Any]]:
    """What the schedulers of `models` report, in order; who does not answer in time is left out."""
    futures = [gateway.dispatcher.report(model.scheduler) for model in models]
    if not futures:
        return []
    try:
        await asyncio.wait(futures, timeout=_REPORT_S)
    finally:
        missing = [future for future in futures if not future.done()]
        for future in missing:
            future.cancel()
    if missing:
        logger.warning(
            "%d of %d schedulers did not report their statistics", len(missing), len(futures)
        )
    return [f.result() for f in futures if not f.cancelled() and f.exception() is None]
