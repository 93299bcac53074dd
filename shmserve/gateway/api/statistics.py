"""The statistics extension: aggregated of what the schedulers report."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import GatewayModel, whole_version

logger = logging.getLogger(__name__)

# A scheduler that does not respond by then (it is stopped, or gone) is left out.
_REPORT_S = 2.0


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


async def collect(
    gateway: Gateway, models: list[GatewayModel], level: int = logging.WARNING
) -> list[dict[str, Any]]:
    """The reports of the schedulers of `models`, in order; one that is late is left out, which the
    log says at this level."""
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
        logger.log(
            level, "%d of %d schedulers did not report their statistics", len(missing), len(futures)
        )
    return [f.result() for f in futures if not f.cancelled() and f.exception() is None]
