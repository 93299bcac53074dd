"""Header blocks: cached ones are decoded correctly for any dynamic table."""

import random

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.http2.frames import ConnectionFault, FaultCode, StreamFault
from shmserve.gateway.http2.header_blocks import (
    Fields,
    HeaderDecoder,
    encode_block,
    parse_content_length,
    validate_request,
)
from tests.support.wire.http2_engine import RequestFields

REQUEST = b"\x83\x86\x84"
_MAX_LIST_SIZE = 65536

names = st.sampled_from([b"a", b"b", b"te", b"grpc-timeout", b"x" * 50])
values = st.sampled_from([b"", b"b", b"trailers", b"1S", b"y" * 60, b"z" * 200])


def _string(value: bytes) -> bytes:
    return encode_block(((value, b""),))[1:-1]


def _literal(start: int, name: bytes, value: bytes) -> bytes:
    return bytes((start,)) + _string(name) + _string(value)


pieces = st.one_of(
    st.integers(0x81, 0xC8).map(lambda index: bytes((index,))),  # indices in both tables and beyond
    st.builds(_literal, st.sampled_from([0x40, 0x40, 0x00, 0x10]), names, values),
    st.builds(
        lambda index, value: bytes((0x40 | index,)) + _string(value), st.integers(1, 63), values
    ),
)
updates = st.sampled_from([b"\x20", b"\x3f\x01", b"\x3f\x4b", b"\x3f\xe1\x1f", b"\x3f\x81\x02"])
blocks = st.builds(
    lambda headers_before, headers_after: (
        b"".join(headers_before) + REQUEST + b"".join(headers_after)
    ),
    st.lists(updates, max_size=2) | st.just([]),
    st.lists(pieces, max_size=4),
)


@settings(max_examples=300)
@given(st.lists(blocks, min_size=1, max_size=4), st.lists(st.integers(0, 11), max_size=25))
def test_cached_blocks_equal_decoded_blocks(known_blocks: list[bytes], order: list[int]) -> None:
    own, hpack = (HeaderDecoder(RequestFields, _MAX_LIST_SIZE), Decoder(_MAX_LIST_SIZE))
    for number in order:
        block, change = known_blocks[number % len(known_blocks)], number % 3
        try:
            expected = list(hpack.decode(block, raw=True))
        except HPACKError:
            with pytest.raises(ConnectionFault):
                own.decode_request(block)
            return
        if change == 1:
            own.skip_block(block)
            continue
        try:
            fields = list(validate_request(expected))
        except StreamFault:
            with pytest.raises(StreamFault):
                own.decode_request(block)
        else:
            assert list(own.decode_request(block)) == fields
        own_table, hpack_table = own._decoder.header_table, hpack.header_table
        assert list(own_table.dynamic_entries) == list(hpack_table.dynamic_entries)


@settings(max_examples=50)
@given(st.integers(0), st.lists(st.lists(st.tuples(names, values), max_size=4), max_size=30))
def test_an_encoder_of_a_client(seed: int, requests: list[list[tuple[bytes, bytes]]]) -> None:
    """Header blocks of an encoder whose table size changes at times are decoded correctly."""
    rng = random.Random(seed)
    encoder, own_decoder = Encoder(), HeaderDecoder(RequestFields, _MAX_LIST_SIZE)
    pseudo_fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x")]
    for fields in requests:
        fields = [(name, b"trailers" if name == b"te" else value) for name, value in fields]
        if rng.random() < 0.2:
            encoder.header_table_size = rng.choice([0, 40, 100, 4096])
        for _ in range(3):
            block = encoder.encode([*pseudo_fields, *fields], huffman=rng.random() < 0.5)
            assert list(own_decoder.decode_request(block)) == [*pseudo_fields, *fields]


def test_a_repeated_block_is_decoded_once() -> None:
    read_fields: list[object] = []

    def record_read(fields: Fields) -> RequestFields:
        read_fields.append(fields)
        return RequestFields(fields)

    decoder = HeaderDecoder(record_read, _MAX_LIST_SIZE)
    first_fields = decoder.decode_request(REQUEST)
    assert decoder.decode_request(REQUEST) is first_fields
    assert len(read_fields) == 1
    decoder.skip_block(b"\x40\x01a\x01b")  # the table is another
    assert decoder.decode_request(REQUEST) is not first_fields


def test_a_change_of_the_table_is_detected_at_equal_length() -> None:
    """A new field replaces an evicted one, so that the same bytes have another meaning."""
    decoder = HeaderDecoder(RequestFields, _MAX_LIST_SIZE)
    newest = REQUEST + b"\xbe"
    # The table has space for one field.
    decoder.decode_request(b"\x3f\x03" + REQUEST + b"\x40\x01a\x01b")
    for _ in range(2):
        assert decoder.decode_request(newest)[-1] == (b"a", b"b")
    decoder.decode_request(REQUEST + b"\x40\x01c\x01d")
    assert decoder.decode_request(newest)[-1] == (b"c", b"d")
    decoder.skip_block(b"\x40\x01e\x01f")
    assert decoder.decode_request(newest)[-1] == (b"e", b"f")


def test_a_malformed_request_stays_malformed() -> None:
    decoder = HeaderDecoder(RequestFields, _MAX_LIST_SIZE)
    for _ in range(3):
        with pytest.raises(StreamFault):
            decoder.decode_request(REQUEST[:2])


def test_the_cache_is_bounded() -> None:
    """Long blocks are not cached, since the memory is meant for frequent ones."""
    decoder = HeaderDecoder(RequestFields, _MAX_LIST_SIZE)
    for number in range(1000):
        decoder.decode_request(REQUEST + encode_block(((b"a", b"%d" % number),)))
        assert len(decoder._heads) <= 64
    long_block = REQUEST + encode_block(((b"a", b"x" * 1000),))
    decoder.decode_request(long_block)
    assert long_block not in decoder._heads


def test_nothing_is_cached_without_access_to_the_table() -> None:
    decoder = HeaderDecoder(RequestFields, _MAX_LIST_SIZE)
    decoder._can_cache = False
    assert decoder.decode_request(REQUEST) is not decoder.decode_request(REQUEST)


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=300)), max_size=5))
def test_encoded_blocks_are_decoded_by_clients(fields: list[tuple[bytes, bytes]]) -> None:
    """The client decodes the same fields, and its dynamic table does not change."""
    decoder = Decoder()
    assert list(decoder.decode(encode_block(fields), raw=True)) == fields
    assert not decoder.header_table.dynamic_entries


def test_lengths_at_the_limits_of_integers() -> None:
    for size in (0, 126, 127, 128, 254, 255, 16510, 16511, 40000):
        field = (b"n" * size, b"v" * size)
        assert list(Decoder(10**6).decode(encode_block([field]), raw=True)) == [field]


def test_a_header_list_that_is_too_large_is_refused() -> None:
    """The stream fails; a list of several times the size ends the connection early."""
    decoder = HeaderDecoder(RequestFields, 1000)
    field = b"\x00" + _string(b"n" * 34) + _string(b"v" * 34)  # 100 bytes
    start = 43 + 43 + 38  # of REQUEST: method, scheme, path
    assert len(decoder.decode_request(REQUEST + field * ((1000 - start) // 100))) == 3 + 8
    indexed = b"\x40" + _string(b"k") + _string(b"v")
    with pytest.raises(StreamFault) as refusal:
        decoder.decode_request(REQUEST + indexed + field * ((1000 - start) // 100 + 1))
    assert refusal.value.code is FaultCode.ENHANCE_YOUR_CALM
    assert decoder.decode_request(REQUEST + b"\xbe")[-1] == (b"k", b"v")
    with pytest.raises(ConnectionFault) as caught:
        decoder.decode_request(REQUEST + field * 40)
    assert caught.value.code is FaultCode.ENHANCE_YOUR_CALM


def test_content_lengths() -> None:
    field = b"content-length"
    assert parse_content_length([]) == -1
    assert parse_content_length([(field, b"0")]) == 0
    assert parse_content_length([(field, b"17"), (b"a", b"b"), (field, b"17")]) == 17
    assert parse_content_length([(field, b"9" * 19)]) == 10**19 - 1
    for wrong_value in (b"9" * 20, b"-1", b"1.0", b"0x1", b" 1", b"1_0", b""):
        with pytest.raises(StreamFault):
            parse_content_length([(field, wrong_value)])
