"""A fixture of pytest for tests of models.

from shmserve.testing import serve_model

def test_blur(serve_model):
    server = serve_model(Blur)
    assert server.infer("blur", image=x)["output"].shape == x.shape
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmserve.serving import LocalServer, Models, serve, user_log

__all__ = ["serve_model"]


@pytest.fixture
def serve_model() -> Iterator[Callable[..., LocalServer]]:
    """Yield a function that starts a server; its servers end with the test.

    The output of the models, and the server's warnings and errors, are shown with a failed test.

        def test_blur(serve_model):
            server = serve_model(Blur, timeout=30)
            assert server.infer("blur", image=x)["output"].shape == x.shape

    Yields:
        A function with the arguments and errors of `shmserve.serve`, which returns the client
        (`LocalServer`) once all models are ready.
    """
    with contextlib.ExitStack() as stack:

        def start(models: Models, **options: Any) -> LocalServer:
            server = stack.enter_context(serve(models, **options))
            stack.callback(_print_log, server)
            return server

        yield start


def _print_log(server: LocalServer) -> None:
    print(re.sub(r"(?m)^I \d{4}-.*\n", "", user_log(server.log, server.sources)), end="")
