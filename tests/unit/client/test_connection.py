"""What a program is told when no server lets it in."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest

import shmserve.client


def test_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(shmserve.client.Disconnected, match="no run directory"):
        shmserve.client.connect(tmp_path / "nothing")
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(tmp_path))
    with pytest.raises(shmserve.client.Disconnected, match="no server answers"):
        shmserve.client.connect()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "or one too many"),
        (
            msgpack.packb([2, ["Welcome", 1, "token"]]),
            "the peer has protocol version 2, this process has version 3",
        ),
    ],
)
def test_a_server_that_lets_nobody_in(tmp_path: Path, answer: bytes, why: str) -> None:
    """It is there, so whoever reads the error need not look for it."""
    (tmp_path / "guests").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "guests" / "door"))
        listener.listen()

        def show_out() -> None:
            link, _ = listener.accept()
            with link:
                assert link.recv(1024)
                link.send(answer)

        with ThreadPoolExecutor(1) as pool:
            shown_out = pool.submit(show_out)
            with pytest.raises(shmserve.client.Disconnected, match=why):
                shmserve.client.connect(tmp_path)
            shown_out.result()
