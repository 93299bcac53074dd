"""What of gRPC's own log records is shown."""

from __future__ import annotations

import logging
import sys

import pytest
from grpc._cython import cygrpc

from shmserve.gateway.grpc.main import _is_news


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (cygrpc.ExecuteBatchError("Failed"), False),
        (RuntimeError("of ours"), True),
        (None, True),
    ],
)
def test_a_client_that_left_is_no_news(error: Exception | None, shown: bool) -> None:
    info = None
    if error is not None:
        try:
            raise error
        except Exception:
            info = sys.exc_info()
    record = logging.LogRecord("grpc", logging.ERROR, "", 0, "it failed", (), info)
    assert _is_news(record) is shown
