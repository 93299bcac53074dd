"""TLS without sockets: a client's TLS against a connection's."""

import contextlib
import ssl
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.gateway.grpc.connection import BrokenTls, TlsLayer
from shmserve.gateway.settings import Tls


@pytest.fixture(scope="module")
def tls_context(keys: Path) -> ssl.SSLContext:
    return Tls(f"{keys}/server.pem", f"{keys}/server.key").context()


@pytest.fixture(scope="module")
def mutual_tls(keys: Path) -> ssl.SSLContext:
    return Tls(f"{keys}/server.pem", f"{keys}/server.key", f"{keys}/ca.pem").context()


class Client:
    """A client's end."""

    def __init__(
        self,
        protocols: list[str],
        version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
        certificate: Path | None = None,
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = version
        if protocols:
            context.set_alpn_protocols(protocols)
        if certificate is not None:
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing)

    def shake_hands(self, layer: TlsLayer) -> bytes:
        received = b""
        for _ in range(5):
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
            received += layer.receive(self.outgoing.read())
            self.incoming.write(layer.take_ciphertext())
        return received

    def read(self) -> bytes:
        received = b""
        try:
            while piece := self.tls.read(65536):
                received += piece
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return received


def connect_client(context: ssl.SSLContext) -> tuple[Client, TlsLayer]:
    client, layer = Client(["h2"]), TlsLayer(context)
    client.shake_hands(layer)
    assert layer.is_ready
    return client, layer


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_data_passes_in_two_ways(tls_context: ssl.SSLContext, version: ssl.TLSVersion) -> None:
    client, layer = Client(["http/1.1", "h2"], version), TlsLayer(tls_context)
    assert not layer.is_ready
    client.shake_hands(layer)
    assert layer.is_ready
    client.tls.write(b"a request")
    assert layer.receive(client.outgoing.read()) == b"a request"
    layer.send(b"a response")
    layer.send(memoryview(b"xx and more")[2:])
    client.incoming.write(layer.take_ciphertext())
    assert client.read() == b"a response and more"


def test_data_may_follow_the_handshake_in_one_packet(tls_context: ssl.SSLContext) -> None:
    client, layer = Client(["h2"]), TlsLayer(tls_context)
    while True:
        try:
            client.tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            layer.receive(client.outgoing.read())
            client.incoming.write(layer.take_ciphertext())
    client.tls.write(b"at once")
    assert layer.receive(client.outgoing.read()) == b"at once"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_records_are_decrypted_for_any_split(tls_context: ssl.SSLContext, steps: list[int]) -> None:
    client, layer = connect_client(tls_context)
    data = bytes(range(256)) * 600
    client.tls.write(data)
    sent_data = client.outgoing.read()
    received, offset, count = b"", 0, 0
    while offset < len(sent_data):
        step = steps[count % len(steps)]
        received += layer.receive(sent_data[offset : offset + step])
        offset, count = offset + step, count + 1
    assert received == data


def test_large_data(tls_context: ssl.SSLContext) -> None:
    client, layer = connect_client(tls_context)
    data = bytes(5 << 20)
    layer.send(data)
    client.incoming.write(layer.take_ciphertext())
    assert client.read() == data


@pytest.mark.parametrize("protocols", [[], ["http/1.1"]])
def test_clients_with_http1_are_refused(tls_context: ssl.SSLContext, protocols: list[str]) -> None:
    client, layer = Client(protocols), TlsLayer(tls_context)
    with pytest.raises(BrokenTls):
        client.shake_hands(layer)
    assert not layer.is_ready


@given(st.binary(min_size=5, max_size=100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_clients_without_tls_are_refused(tls_context: ssl.SSLContext, data: bytes) -> None:
    layer = TlsLayer(tls_context)
    with contextlib.suppress(BrokenTls):
        assert layer.receive(data) == b""
    assert not layer.is_ready
    layer.take_ciphertext()
    layer.close()


def test_http2_without_tls_is_refused(tls_context: ssl.SSLContext) -> None:
    with pytest.raises(BrokenTls):
        TlsLayer(tls_context).receive(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def test_a_corrupt_record_is_refused(tls_context: ssl.SSLContext) -> None:
    client, layer = connect_client(tls_context)
    client.tls.write(b"a request")
    sent_data = bytearray(client.outgoing.read())
    sent_data[-1] ^= 1
    with pytest.raises(BrokenTls):
        layer.receive(bytes(sent_data))
    layer.close()


def test_certificates_of_clients(mutual_tls: ssl.SSLContext, keys: Path) -> None:
    known_client, layer = Client(["h2"], certificate=keys / "client.pem"), TlsLayer(mutual_tls)
    known_client.shake_hands(layer)
    assert layer.is_ready
    for client in (Client(["h2"]), Client(["h2"], certificate=keys / "stranger.pem")):
        with pytest.raises(BrokenTls):
            client.shake_hands(TlsLayer(mutual_tls))


def test_closing_tls_is_accepted(tls_context: ssl.SSLContext) -> None:
    """Either side may close; late bytes are not an error of the server."""
    client, layer = connect_client(tls_context)
    layer.close()
    client.incoming.write(layer.take_ciphertext())
    assert client.read() == b""
    layer.send(b"late")
    other_client, layer = connect_client(tls_context)
    with pytest.raises(ssl.SSLWantReadError):
        other_client.tls.unwrap()
    assert layer.receive(other_client.outgoing.read()) == b""
    layer.send(b"the rest")
    layer.close()
    other_client.incoming.write(layer.take_ciphertext())
