"""The holder of a workspace lease dies under load: requests that wait for the lease are served."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.servers import running
from tests.support.waiting import until
from tests.support.workspace_models import add, request_body

MB = 1 << 20
DEATH_COUNT = 3


def test_the_holder_of_a_workspace_dies(tmp_path: Path) -> None:
    add(tmp_path, "others", 8 * MB)
    add(tmp_path, "holder", 12 * MB)
    with running(tmp_path, f"--workspace-byte-size=cpu={12 * MB}") as server:

        def send_requests(count: int) -> list[int]:
            with server.http() as http:
                replies = [http.infer("others", request_body(n)).ok() for n in range(count)]
            return [int(reply.tensors()["WRONG"][0]) for reply in replies]

        def is_ready() -> bool:
            return server.answers("/v2/models/holder/ready")

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(send_requests, 40) for _ in range(4)]
            for _ in range(DEATH_COUNT):
                with server.http() as http:
                    assert http.infer("holder", request_body(-9)).status in (500, 503)
                until("it is ready again", is_ready)
            assert [future.result() for future in futures] == [[0] * 40] * 4
        with server.http() as http:  # all of the pool is free again
            http.infer("holder", request_body(1)).ok()
