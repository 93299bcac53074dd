"""The metrics listener, where only GET /metrics has content."""

from __future__ import annotations

import logging

from shmserve.common.access.auth_tokens import METRICS
from shmserve.errors import Unauthenticated
from shmserve.gateway.api import metrics as api
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.request import Request
from shmserve.gateway.http.response import Reply, error_reply

logger = logging.getLogger(__name__)

_TEXT = b"Content-Type: text/plain; charset=utf-8\r\n"


async def metrics(gateway: Gateway, request: Request) -> Reply:
    """Any request on the metrics listener."""
    refusal = request.connection.client.refuse(METRICS, request.headers)
    if refusal is not None:
        headers = b"WWW-Authenticate: Bearer\r\n" if isinstance(refusal, Unauthenticated) else b""
        return error_reply(refusal.status, refusal.message, headers=headers)
    if request.target.partition("?")[0] not in ("/metrics", "/metrics/"):
        return Reply()
    if request.method != "GET":
        return error_reply(405, "Method Not Allowed")
    try:
        return Reply(200, (await api.page(gateway),), _TEXT)
    except Exception:
        logger.exception("metrics could not be made")
        return error_reply(500, "internal error")
