"""GET /: the dashboard's page, one file, and the policy by which a browser runs nothing else.

A browser sends no token with an address that is typed: it is shown the page all the same, with the
status of a refusal, and the page asks for the token. There is nothing of the server in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from shmserve.common.auth_tokens import METRICS
from shmserve.errors import Unauthenticated
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.request import HttpRequest
from shmserve.gateway.http.response import HttpResponse


async def page(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """The page. Raises PermissionDenied for a token of other scopes."""
    body, headers = _page()
    refusal = request.connection.client.refuse(METRICS, request.headers)
    if refusal is None:
        return HttpResponse(200, (body,), headers)
    if not isinstance(refusal, Unauthenticated):
        raise refusal
    return HttpResponse(refusal.status, (body,), headers + b"WWW-Authenticate: Bearer\r\n")


@cache
def _page() -> tuple[bytes, bytes]:
    body = Path(__file__).with_name("page.html").read_bytes()
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"style-src {_hash(body, b'style')}; script-src {_hash(body, b'script')}"
    )
    headers = (
        "Content-Type: text/html; charset=utf-8\r\n"
        f"Content-Security-Policy: {policy}\r\n"
        "Referrer-Policy: no-referrer\r\n"
        "Cache-Control: no-cache\r\n"
    )
    return body, headers.encode()


def _hash(body: bytes, tag: bytes) -> str:
    """The source of a policy that the one element of this kind is."""
    (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
