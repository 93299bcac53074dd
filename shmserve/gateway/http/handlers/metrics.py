"""The handler of the metrics listener, where only GET /metrics has content."""

from __future__ import annotations

import logging

from shmserve.common.access.auth_tokens import METRICS
from shmserve.errors import Unauthenticated
from shmserve.gateway.api.metrics.exporter import MetricsExporter
from shmserve.gateway.http.request import HttpRequest
from shmserve.gateway.http.response import HttpResponse, error_response

logger = logging.getLogger(__name__)

_TEXT = b"Content-Type: text/plain; charset=utf-8\r\n"


async def metrics(exporter: MetricsExporter, request: HttpRequest) -> HttpResponse:
    """Any request on the metrics listener."""
    refusal = request.connection.client.refuse(METRICS, request.headers)
    if refusal is not None:
        headers = b"WWW-Authenticate: Bearer\r\n" if isinstance(refusal, Unauthenticated) else b""
        return error_response(refusal.status, refusal.message, headers=headers)
    if request.target.partition("?")[0] not in ("/metrics", "/metrics/"):
        return HttpResponse()
    if request.method != "GET":
        return error_response(405, "Method Not Allowed")
    try:
        return HttpResponse(200, (await exporter.page(),), _TEXT)
    except Exception:
        logger.exception("metrics could not be made")
        return error_response(500, "internal error")
