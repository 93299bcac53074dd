"""Regions that change while requests use them."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import repositories
from tests.support.regions import SharedObject
from tests.support.request_pool import request_pool
from tests.support.servers import Server
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, gated_request, region_request


@pytest.fixture(scope="module")
def server(models: Path, serve_models: Callable[[Path], Server]) -> Server:
    repositories.add(models, "gated", "identity")
    return serve_models(models)


@pytest.mark.parametrize("name", ["draining", ""])
def test_a_region_stays_listed_while_a_request_uses_it(server: Server, name: str) -> None:
    """Every gateway lists it, and new requests may use it until the last request ends."""
    with SharedObject(8192) as shared_object, request_pool(server) as pool, server.http() as http:
        http.register("draining", shared_object.key, 8192).ok()
        reply = http.regions("draining").ok().json()
        pending = pool.infer("gated", gated_request(1, "draining", 0))
        visit = server.gate.next()
        http.unregister(name).ok()
        for _ in range(8):  # new connections reach different gateways
            with server.http() as other_http:
                assert other_http.regions("draining").ok().json() == reply
                assert other_http.regions().ok().json() == reply
        later_request = pool.infer("gated", gated_request(2, "draining", 64))
        server.wait_pending("gated", 1)
        http.unregister().ok()  # a second unregistration has no effect
        visit.release()
        assert pending.result().status == 200
        visit = server.gate.next()
        assert http.regions("draining").ok().json() == reply
        assert http.infer("identity", region_request("draining", 4096)).status == 200
        visit.release()
        assert later_request.result().status == 200
        assert (shared_object.read(np.int32, 16, 64) == 2).all()
        until("it is not listed", lambda: http.regions().ok().json() == [])
        assert http.regions("draining").status == 404


def test_unregister_drains_under_load(server: Server) -> None:
    """An unregistered region is removed once no request uses it. Later requests receive 404."""
    with SharedObject(8192) as shared, SharedObject(8192) as other, request_pool(server, 2) as pool:
        shared.write(np.arange(1024, dtype=np.float32))

        def ask_until_refused(http: Http) -> Any:
            while (reply := http.infer("identity", region_request("busy", 4096))).status == 200:
                pass
            return reply

        with server.http() as http:
            http.register("busy", shared.key, 8192).ok()
            pending_calls = [pool.send(ask_until_refused) for _ in range(2)]
            until("they ask", lambda: server.metric("nv_inference_count", model="identity") > 20)
            http.unregister("busy").ok()
            for answer in pending_calls:
                assert answer.result().status == 404
            until("it is not listed", lambda: http.regions().json() == [])
            http.register("busy", other.key, 8192).ok()
            assert http.infer("identity", region_request("busy", 4096)).status == 200
            assert not other.read(np.float32, 1024, 4096).any()
            http.unregister("busy").ok()


def test_the_mapping_ends_with_the_last_request(server: Server) -> None:
    """No process holds the object after the last request of an unregistered region."""
    with SharedObject(4096) as shared_object, request_pool(server) as pool, server.http() as http:
        http.register("held", shared_object.key, 4096).ok()
        pending = pool.infer("gated", gated_request(1, "held", 0))
        visit = server.gate.next()
        http.unregister("held").ok()
        assert holders(server, shared_object.name)
        visit.release()
        assert pending.result().status == 200
        until("nobody holds it", lambda: not holders(server, shared_object.name))


def holders(server: Server, name: str) -> list[str]:
    """Return the server's processes that have the object open or mapped."""
    results = []
    for process in server.tree():
        opened_paths = []
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            # The descriptor was closed in the meantime.
            with contextlib.suppress(FileNotFoundError):
                opened_paths.append(str(link.readlink()))
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        if any(name in target for target in opened_paths) or name in maps:
            results.append(process.name())
    return results
