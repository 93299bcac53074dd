"""Dealers and routers over real sockets: order, identities, disconnects, slow peers, libzmq."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import Answered
from shmserve.ipc.messages.supervision import ConfigCompleted, Drain
from shmserve.ipc.transport import frames, zmtp
from shmserve.ipc.transport.router import Router
from shmserve.ipc.transport.zmtp import Dealer
from tests.rigs.arrivals import encode_zmtp, receive_arrived, send_raw


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    new_router = Router(f"ipc://{tmp_path}/r")
    yield new_router
    new_router.close()


@pytest.fixture
def dealer(router: Router) -> Iterator[Dealer]:
    new_dealer = Dealer(router.endpoint, "me")
    yield new_dealer
    new_dealer.close()


def test_a_late_close_does_not_remove_the_socket_of_another_router(tmp_path: Path) -> None:
    """Another server may have created a removed run directory again."""
    endpoint = f"ipc://{tmp_path}/both"
    first_router, second_router = Router(endpoint), Router(endpoint)
    first_router.close()
    dealer = Dealer(endpoint, "me")
    dealer.send(m.Cancel(7))
    assert receive_arrived(second_router) == [(b"me", m.Cancel(7))]
    dealer.close()
    second_router.close()
    assert not list(tmp_path.iterdir())


def test_a_frame_of_another_version_is_dropped_and_both_versions_are_logged(
    router: Router, dealer: Dealer, caplog: pytest.LogCaptureFixture
) -> None:
    older_message = msgpack.packb([frames.VERSION - 1, ["Cancel", 1, False]])
    send_raw(dealer, b"", encode_zmtp(older_message))
    dealer.send(m.Cancel(2))
    assert receive_arrived(router) == [(b"me", m.Cancel(2))] and router.malformed_messages == 1
    assert "the peer has protocol version 2, this process has version 3" in caplog.text


def test_messages_arrive_in_order_in_both_directions(router: Router, dealer: Dealer) -> None:
    for number in range(5):
        dealer.post(m.Cancel(number))
    dealer.flush()
    dealer.send(m.Cancel(5))
    received: list[Any] = []
    while len(received) < 6:
        received += receive_arrived(router)
    assert received == [(b"me", m.Cancel(number)) for number in range(6)]
    router.post(b"me", m.Settled(1))
    router.post(b"me", m.Settled(2))
    router.post(b"nobody", m.Settled(3))
    router.flush()
    assert receive_arrived(dealer) == [m.Settled(1), m.Settled(2)]


def test_a_message_that_cannot_be_packed_is_not_sent(router: Router, dealer: Dealer) -> None:
    with pytest.raises(TypeError):
        dealer.send(ConfigCompleted({"max_batch_size": object()}))
    dealer.send(m.Cancel(7))
    assert receive_arrived(router) == [(b"me", m.Cancel(7))]


def test_an_unencodable_message_does_not_block_other_peers(router: Router, dealer: Dealer) -> None:
    other_dealer = Dealer(router.endpoint, "other")
    for link in (dealer, other_dealer):
        link.send(m.Cancel(1))
        assert receive_arrived(router)
    router.post(b"other", m.Settled(1))
    router.post(b"me", Answered(2, {"found": object()}))
    router.post(b"me", m.Settled(3))
    with pytest.raises(TypeError):
        router.flush()
    router.post(b"me", m.Settled(4))
    router.post(b"other", m.Settled(5))
    router.flush()
    assert receive_arrived(dealer) == [m.Settled(4)]
    received: list[Any] = []
    while len(received) < 2:
        received += receive_arrived(other_dealer)
    assert received == [m.Settled(1), m.Settled(5)] and not other_dealer.wait(0)
    other_dealer.close()


def test_the_last_messages_arrive_after_the_close(router: Router, dealer: Dealer) -> None:
    dealer.send(m.Cancel(7))
    dealer.close()
    assert receive_arrived(router) == [(b"me", m.Cancel(7))]
    assert receive_arrived(router, 0.2) == [] and not router.wait(0)


def test_a_peer_that_does_not_read_costs_no_wait(router: Router, dealer: Dealer) -> None:
    """Both sides send more than the socket buffers hold, and nothing is lost."""
    dealer.send(m.Cancel(1))
    assert receive_arrived(router)
    large_message = m.Finished(2, bytes(3 << 20), [])
    dealer.send(large_message)
    router.post(b"me", large_message)
    router.flush()
    at_router: list[Any] = []
    at_dealer: list[Any] = []
    while not (at_router and at_dealer):
        at_router += router.receive()
        at_dealer += dealer.receive()
    assert at_router == [(b"me", large_message)] and at_dealer == [large_message]


def test_an_identity_that_is_taken_is_refused(router: Router, dealer: Dealer) -> None:
    dealer.send(m.Cancel(1))
    assert receive_arrived(router)
    second_dealer = Dealer(router.endpoint, "me")
    second_dealer.send(m.Cancel(2))
    assert receive_arrived(router, 0.5) == []
    assert receive_arrived(second_dealer, 0.5) == [] and not second_dealer.connected
    router.post(b"me", m.Settled(1))
    router.flush()
    assert receive_arrived(dealer) == [m.Settled(1)]
    second_dealer.close()


def test_a_dealer_without_a_listener_is_disconnected(tmp_path: Path) -> None:
    dealer = Dealer(f"ipc://{tmp_path}/none", "me")
    dealer.send(m.Cancel(1))
    assert dealer.receive() == [] and not dealer.connected and not dealer.wait(0)
    dealer.close()


def test_a_peer_disconnect_is_reported(router: Router, dealer: Dealer) -> None:
    dealer.send(m.Cancel(1))
    assert receive_arrived(router)
    router.post(b"me", m.Settled(1))
    router.flush()
    router.close()
    assert receive_arrived(dealer) == [m.Settled(1)]
    dealer.send(m.Cancel(2))
    assert receive_arrived(dealer, 0.5) == [] and not dealer.connected
    dealer.send(m.Cancel(3))


def test_a_single_peer_is_read_without_a_poll(router: Router, dealer: Dealer) -> None:
    dealer.send(m.Cancel(1))
    assert receive_arrived(router) == [(b"me", m.Cancel(1))]
    counting_poll = router._poll = _CountingPoll(router._poll)  # type: ignore[assignment]
    dealer.send(m.Cancel(2))
    assert (router.receive(), counting_poll.polls) == ([(b"me", m.Cancel(2))], 0)
    assert (router.receive(), counting_poll.polls) == ([], 1)


def test_a_connecting_peer_is_accepted_while_another_floods(router: Router, dealer: Dealer) -> None:
    dealer.send(m.Cancel(0))
    assert receive_arrived(router) == [(b"me", m.Cancel(0))]
    other_dealer = Dealer(router.endpoint, "other")
    other_dealer.send(m.Cancel(1))
    received: list[tuple[bytes, Any]] = []
    for number in range(2, 40):
        dealer.send(m.Cancel(number))
        received += router.receive()
    other_dealer.close()
    assert (b"other", m.Cancel(1)) in received
    assert [text for peer, text in received if peer == b"me"] == list(map(m.Cancel, range(2, 40)))


class _CountingPoll:
    """A poll that counts its calls."""

    def __init__(self, poll: Any) -> None:
        self._wrapped = poll
        self.polls = 0

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        self.polls += 1
        events: list[tuple[int, int]] = self._wrapped.poll(timeout_s)
        return events

    def close(self) -> None:
        self._wrapped.close()


def test_malformed_messages_are_counted_and_other_protocols_disconnected(
    router: Router, dealer: Dealer
) -> None:
    send_raw(
        dealer, b"", encode_zmtp(b"garbage") + b"\1\1a\0\1b" + encode_zmtp(frames.pack([Drain()]))
    )
    assert receive_arrived(router) == [(b"me", Drain())] and router.malformed_messages == 2
    with socket.socket(socket.AF_UNIX) as plain_socket:
        plain_socket.connect(router.endpoint.removeprefix("ipc://"))
        plain_socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert receive_arrived(router, 0.5) == []
        plain_socket.settimeout(5)
        assert plain_socket.recv(1000).startswith(zmtp.GREETING)


def test_libzmq_peers_are_compatible(router: Router) -> None:
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as zmq_dealer:
            zmq_dealer.setsockopt(zmq.IDENTITY, b"theirs")
            zmq_dealer.connect(router.endpoint)
            for size in (1, 300, 100_000):
                zmq_dealer.send(frames.pack([m.Finished(size, bytes(size), [])]))
                assert receive_arrived(router) == [(b"theirs", m.Finished(size, bytes(size), []))]
                router.post(b"theirs", m.Finished(size, bytes(size), []))
                router.flush()
                while not zmq_dealer.poll(10):
                    list(router.receive())
                assert frames.unpack(zmq_dealer.recv()) == [m.Finished(size, bytes(size), [])]
    finally:
        context.destroy(0)
