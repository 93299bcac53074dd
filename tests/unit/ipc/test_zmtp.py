"""ZMTP: frames are decoded however they are split, and malformed bytes are rejected."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.transport import zmtp
from tests.rigs.arrivals import encode_zmtp

HANDSHAKE = zmtp.GREETING + zmtp.ready_command("DEALER", b"me")


def feed(data: bytes, cuts: list[int]) -> tuple[zmtp.Decoder, list[bytes]]:
    decoder = zmtp.Decoder()
    messages: list[bytes] = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        if not decoder.violation:
            messages += decoder.feed(data[start:end])
    return decoder, messages


BODIES = st.lists(st.one_of(st.binary(max_size=300), st.integers(0, 5000).map(bytes)), max_size=8)
CUT_POINTS = st.lists(st.integers(0, 100_000), max_size=12)


@given(BODIES, CUT_POINTS)
def test_messages_are_decoded_for_any_split(bodies: list[bytes], cuts: list[int]) -> None:
    data = HANDSHAKE + b"".join(map(encode_zmtp, bodies))
    decoder, messages = feed(data, cuts)
    assert not decoder.violation and messages == bodies
    assert decoder.properties == {"socket-type": b"DEALER", "identity": b"me"}


@given(st.binary(max_size=400), CUT_POINTS)
def test_any_bytes_are_a_broken_connection_or_nothing(data: bytes, cuts: list[int]) -> None:
    for start in (b"", zmtp.GREETING, HANDSHAKE):
        decoder, messages = feed(start + data, cuts)
        assert decoder.violation or decoder.properties is not None or not messages


def test_messages_of_several_parts_and_commands_are_dropped() -> None:
    ping = b"\x04\x07\x04PING\x00\x00"
    data = HANDSHAKE + b"\x01\x01a\x01\x01b\x00\x01c" + ping + encode_zmtp(b"one")
    decoder, messages = feed(data, [])
    assert messages == [b"one"] and decoder.dropped_messages == 1 and not decoder.violation


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "not ZMTP"),
        (b"\xff" + bytes(8) + b"\x7e" + bytes(60), "not ZMTP"),
        (zmtp.GREETING[:10] + b"\x01" + zmtp.GREETING[11:], "version"),
        (zmtp.GREETING.replace(b"NULL\0", b"CURVE"), "mechanism"),
        (zmtp.GREETING + encode_zmtp(b"too early"), "before the handshake"),
        (zmtp.GREETING + b"\x04\x06\x05HELLO", "without READY"),
        (zmtp.GREETING + b"\x04\x09\x05READY\x0bSo", "cut short"),
        (zmtp.GREETING + b"\x04\x0c\x05READY\x01a\x00\x00\x00\x09", "cut short"),
        (HANDSHAKE + b"\x02" + (2**63).to_bytes(8, "big"), "too large"),
        (HANDSHAKE + b"\x08\x00", "unknown flags"),
    ],
)
def test_unsupported_zmtp_is_refused(data: bytes, reason: str) -> None:
    decoder, messages = feed(data, [])
    assert reason in decoder.violation and messages == []


def test_a_large_message_is_announced_before_it_is_kept() -> None:
    decoder = zmtp.Decoder()
    decoder.feed(HANDSHAKE + b"\x02" + (2**31 + 4096).to_bytes(8, "big"))
    assert not decoder.violation, "the files of a load request may have 2 GiB"
    decoder = zmtp.Decoder()
    decoder.feed(HANDSHAKE + b"\x02" + (1 << 20).to_bytes(8, "big"))
    for _ in range(15):
        assert decoder.feed(bytes(1 << 16)) == []
    assert [len(message) for message in decoder.feed(bytes(1 << 16))] == [1 << 20]
