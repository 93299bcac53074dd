"""RFC 7541 by section: header blocks of requests, as clients may write them."""

import pytest

from shmserve.gateway.http2.frames import FaultCode
from tests.support.wire.http2 import CLIENT_OPENING, END_HEADERS, END_STREAM, HEADERS, frame
from tests.support.wire.http2_engine import Case, Engine

BROKEN = (FaultCode.COMPRESSION_ERROR,)
# Of the table that never changes: :method: POST, :scheme: http, :path: /.
REQUEST = b"\x83\x86\x84"


def headers_frame(block: bytes, stream: int = 1) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, block)


# The package `hpack` decodes the blocks; these are the rules that are checked beside it.
CASES = [
    Case(*("4.2", "two updates in front", headers_frame(b"\x20\x3f\xe1\x1f" + REQUEST)),
        served=((1, b""), )),
    Case("4.2", "three updates", headers_frame(b"\x20\x3f\x01\x20" + REQUEST), BROKEN),
    Case("4.2", "thousands of updates", headers_frame(b"\x3f\x01" * 8000 + REQUEST), BROKEN),
    Case("6.1", "index 0", headers_frame(REQUEST + b"\x80"), BROKEN),
    Case(*("6.3", "more than SETTINGS_HEADER_TABLE_SIZE",
        headers_frame(b"\x3f\xe2\x1f" + REQUEST)), BROKEN),
    Case("6.3", "a long update without an end", headers_frame(b"\x3f\x80"), BROKEN),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_section(case: Case) -> None:
    case.check()


EXAMPLES = {
    "C.3": [
        "828684410f7777772e6578616d706c652e636f6d",
        "828684be58086e6f2d6361636865",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
    ],
    "C.4": [
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ],
}


@pytest.mark.parametrize("section", EXAMPLES)
def test_the_examples(section: str) -> None:
    """Three requests in a row, without and with Huffman's code."""
    engine = Engine().take(CLIENT_OPENING)
    for index, block in enumerate(EXAMPLES[section]):
        engine.take(headers_frame(bytes.fromhex(block), 2 * index + 1))
    host = (b":authority", b"www.example.com")
    expected_fields = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), host]
    assert list(engine.requests[1].fields) == expected_fields
    assert list(engine.requests[3].fields) == [*expected_fields, (b"cache-control", b"no-cache")]
    assert list(engine.requests[5].fields) == [
        *(expected_fields[0], (b":scheme", b"https"), (b":path", b"/index.html"), host),
        (b"custom-key", b"custom-value"),
    ]
