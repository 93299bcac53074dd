"""The head of a call, as clients may write it, and the header blocks of responses."""

import base64
from urllib.parse import unquote

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from shmserve.gateway.grpc import call
from shmserve.gateway.grpc.framing import ENCODINGS, SUCCEEDED, CallHead, Status, StatusCode
from shmserve.gateway.http2.frames import StreamFault
from shmserve.gateway.http2.header_blocks import check_trailers, validate_request

START_FIELDS = [
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/inference.X/Y")),
    *((b":authority", b"localhost"), (b"te", b"trailers")),
]
CONTENT_TYPE = (b"content-type", b"application/grpc")


def head(*fields: tuple[bytes, bytes], kind: bytes = b"application/grpc") -> CallHead:
    return CallHead([*START_FIELDS, (b"content-type", kind), *fields])


def timeout(value: bytes) -> CallHead:
    return head((b"grpc-timeout", value))


def test_a_minimal_call_head() -> None:
    call_head = head()
    assert call_head.path == "/inference.X/Y"
    assert call_head.refusal is None
    assert call_head.http_status == 200
    assert call_head.timeout_s is None
    assert call_head.data_size == -1
    assert call_head.encoding == "identity" and list(call_head.metadata) == []


@pytest.mark.parametrize("kind", [b"application/grpc+proto", b"application/grpc;charset=utf-8"])
def test_content_types_of_calls(kind: bytes) -> None:
    assert head(kind=kind).refusal is None


@pytest.mark.parametrize("kind", [b"", b"text/html", b"application/json", b"application/grpc-web"])
def test_other_requests_are_refused(kind: bytes) -> None:
    call_head = head(kind=kind)
    assert call_head.http_status == 415
    assert call_head.refusal is not None and call_head.refusal[0] is StatusCode.UNKNOWN
    assert CallHead(START_FIELDS).http_status == 415


def test_other_methods_than_post_are_refused() -> None:
    call_head = CallHead([(b":method", b"GET"), *START_FIELDS[1:], CONTENT_TYPE])
    assert call_head.http_status == 405
    assert call_head.refusal is not None and call_head.refusal[0] is StatusCode.UNIMPLEMENTED


def test_an_unknown_encoding_is_refused() -> None:
    for name in ENCODINGS:
        assert head((b"grpc-encoding", name.encode())).refusal is None
    for wrong_value in (b"br", b"", b"GZIP", b"\xff", b"x" * 60000):
        call_head = head((b"grpc-encoding", wrong_value))
        assert call_head.http_status == 200
        assert call_head.refusal is not None and call_head.refusal[0] is StatusCode.UNIMPLEMENTED
        assert len(call_head.refusal[1]) < 200  # the client's own words do not grow


def test_the_first_error_is_reported() -> None:
    call_head = head((b"grpc-encoding", b"br"), (b"grpc-timeout", b"x"), kind=b"text/html")
    assert call_head.http_status == 415


@pytest.mark.parametrize(
    ("encoded", "seconds"),
    [
        *((b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"4m", 4e-3), (b"5u", 5e-6), (b"6n", 6e-9)),
        *((b"0n", 0), (b"0S", 0), (b"007S", 7), (b"99999999S", 99999999), (b"99999999H", 1e9)),
        (b"9" * 29 + b"H", 1e9),
    ],
)
def test_deadlines(encoded: bytes, seconds: float) -> None:
    deadline = timeout(encoded)
    assert deadline.refusal is None and deadline.timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    "encoded",
    [
        *(b"", b"1", b"S", b"-1S", b"+1S", b"1.5S", b"1s", b"1h", b" 1S", b"1S ", b"1 S", b"0x1S"),
        *(b"1SS", b"\xff1S", b"\xd9\xa1S", b"9" * 30 + b"S", b"9" * 5000 + b"S", b"1S\n"),
    ],
)
def test_malformed_deadlines_are_refused(encoded: bytes) -> None:
    deadline = timeout(encoded)
    assert deadline.refusal is not None and deadline.refusal[0] is StatusCode.INTERNAL
    assert deadline.timeout_s is None


def test_metadata_excludes_protocol_fields() -> None:
    call_head = head(
        *((b"b", b"2"), (b"user-agent", b"me"), (b"a", b"1"), (b"grpc-timeout", b"1S")),
        *((b"b", b"3"), (b"content-length", b"5"), (b"accept-encoding", b"gzip")),
        *((b"grpc-accept-encoding", b"gzip"), (b"grpc-trace-bin", b"AAAA")),
    )
    assert list(call_head.metadata) == [("b", "2"), ("user-agent", "me"), ("a", "1"), ("b", "3")]
    assert call_head.data_size == 5 and call_head.metadata is call_head.metadata


@given(st.binary(max_size=50), st.booleans())
def test_binary_metadata(value: bytes, is_padded: bool) -> None:
    """Base64, with or without padding."""
    base64_value = base64.b64encode(value)
    call_head = head((b"k-bin", base64_value if is_padded else base64_value.rstrip(b"=")))
    assert list(call_head.metadata) == [("k-bin", value)]


def test_a_field_may_contain_several_binary_values() -> None:
    call_head = head((b"k-bin", b"YQ==, Yg,Yw=="), (b"k-bin", b"ZA"))
    assert list(call_head.metadata) == [("k-bin", bytes([byte])) for byte in b"abcd"]


def test_malformed_base64_is_ignored() -> None:
    for wrong_value in (b"!", b"a", b"YQ=", b"Y\xff", b"YQ==="):
        assert list(head((b"k-bin", wrong_value), (b"a", b"b")).metadata)[-1] == ("a", "b")


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.binary(max_size=9)), max_size=5))
def test_arbitrary_fields_are_parsed_or_refused(fields: list[tuple[bytes, bytes]]) -> None:
    """Fields that pass as those of a request have text or binary metadata."""
    sent_fields = [*START_FIELDS, CONTENT_TYPE, *fields]
    try:
        call_head = CallHead(validate_request(sent_fields))
    except StreamFault:
        return
    for key, value in call_head.metadata:
        assert type(value) is (bytes if key.endswith("-bin") else str)


@pytest.mark.parametrize(
    ("accepted_encodings", "encoding"),
    [
        (b"identity, gzip,deflate , x", "gzip"),
        (b"identity, deflate ,gzip", "gzip"),
        (b" deflate ", "deflate"),
        (b"identity,br,", None),
    ],
)
def test_responses_have_an_encoding_that_the_client_accepts(
    accepted_encodings: bytes, encoding: str | None
) -> None:
    assert head((b"grpc-accept-encoding", accepted_encodings)).response_encoding == encoding


def test_responses_are_not_compressed_for_other_clients() -> None:
    assert head().response_encoding is None


def decode_fields(block: bytes) -> list[tuple[bytes, bytes]]:
    decoder = Decoder()
    headers: list[tuple[bytes, bytes]] = list(decoder.decode(block, raw=True))
    assert not decoder.header_table.dynamic_entries  # the same for every client
    return headers


@pytest.mark.parametrize("compression", [None, *ENCODINGS])
def test_the_head_of_a_response(compression: str | None) -> None:
    headers = dict(decode_fields(call.HEADS_BY_ENCODING[compression]))
    assert headers[b":status"] == b"200"
    assert headers[b"content-type"] == b"application/grpc"
    assert headers[b"grpc-accept-encoding"] == b"identity,deflate,gzip"
    assert headers.get(b"grpc-encoding") == (compression.encode() if compression else None)


@pytest.mark.parametrize("status", [200, 405, 415])
def test_a_response_without_messages(status: int) -> None:
    block = call.encode_response_start(status) + call.encode_trailers(
        Status(StatusCode.INTERNAL, "no")
    )
    headers = decode_fields(block)
    assert headers[0] == (b":status", str(status).encode())
    assert headers[-2:] == [(b"grpc-status", b"13"), (b"grpc-message", b"no")]


def test_the_trailers_of_a_response() -> None:
    assert decode_fields(call.OK_TRAILERS) == [(b"grpc-status", b"0")]
    assert call.encode_trailers(SUCCEEDED) is call.OK_TRAILERS
    headers = decode_fields(
        call.encode_trailers(Status(StatusCode.UNAVAILABLE, "", [("retry", "5")]))
    )
    assert headers == [(b"grpc-status", b"14"), (b"retry", b"5")]


@given(st.text(max_size=40))
def test_any_text_may_be_the_details_of_a_status(text: str) -> None:
    """The encoded field is valid and decodes to the same text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    headers = decode_fields(call.encode_trailers(Status(StatusCode.INTERNAL, text)))
    check_trailers([(name, value.strip()) for name, value in headers])
    encoded_text = dict(headers).get(b"grpc-message", b"")
    assert encoded_text.isascii() and unquote(encoded_text.decode()) == text
