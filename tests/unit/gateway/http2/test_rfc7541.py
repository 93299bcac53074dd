"""RFC 7541 by section: header blocks of requests, as clients may write them."""

import pytest

from shmserve.gateway.http2.frames import FaultCode
from tests.support.wire.http2 import CLIENT_OPENING, END_HEADERS, END_STREAM, HEADERS, frame
from tests.support.wire.http2_engine import Case, Engine

BROKEN = (FaultCode.COMPRESSION_ERROR,)
# Of the table that never changes: :method: POST, :scheme: http, :path: /.
REQUEST = b"\x83\x86\x84"
SERVED = ((1, b""),)
INDEXED_FIELD = b"\x40\x01a\x01b"  # a: b, in the table from now on
FIRST = b"\xbe"  # the newest field of the table


def headers_frame(block: bytes, stream: int = 1) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, block)


def broken_case(section: str, title: str, *blocks: bytes) -> Case:
    sent = b"".join(headers_frame(block, 2 * index + 1) for index, block in enumerate(blocks))
    return Case(section, title, sent, ends=BROKEN)


def valid_case(section: str, title: str, *blocks: bytes) -> Case:
    sent = b"".join(headers_frame(block, 2 * n + 1) for n, block in enumerate(blocks))
    return Case(
        section,
        title,
        sent,
        served=tuple((2 * n + 1, b"") for n in range(len(blocks))),
    )


CASES = [
    valid_case("2.3.3", "the last of the table that never changes", REQUEST + b"\xbd"),
    broken_case("2.3.3", "beyond an empty table", REQUEST + b"\xbe"),
    valid_case("2.3.3", "the table's first", REQUEST + INDEXED_FIELD + FIRST),
    broken_case("2.3.3", "beyond the table's first", REQUEST + INDEXED_FIELD + b"\xbf"),
    broken_case("2.3.3", "a name beyond the table", REQUEST + b"\x7e\x01b"),
    broken_case("2.3.3", "a name far beyond the table", REQUEST + b"\x0f\xff\xff\x03\x01b"),
    valid_case("2.3.2", "the table outlives a block", REQUEST + INDEXED_FIELD, REQUEST + FIRST,
        REQUEST + FIRST),
    # --- the table's size
    valid_case("4.2", "an update in front", b"\x20" + REQUEST),
    valid_case("4.2", "two updates in front", b"\x20\x3f\xe1\x1f" + REQUEST),
    valid_case("4.2", "nothing else in a second block", REQUEST, b"\x3f\x09" + REQUEST),
    broken_case("4.2", "an update behind a field", REQUEST + b"\x20"),
    broken_case("4.2", "an update between fields", REQUEST[:1] + b"\x20" + REQUEST[1:]),
    broken_case("4.2", "three updates", b"\x20\x3f\x01\x20" + REQUEST),
    broken_case("4.2", "thousands of updates", b"\x3f\x01" * 8000 + REQUEST),
    broken_case("4.3", "a size of 0 empties the table", REQUEST + INDEXED_FIELD,
        b"\x20" + REQUEST + FIRST),
    broken_case("4.3", "as much as the field needs is enough, less is not", REQUEST + INDEXED_FIELD,
        b"\x3f\x02" + REQUEST + FIRST),
    valid_case("4.3", "what fits stays", REQUEST + INDEXED_FIELD, b"\x3f\x03" + REQUEST + FIRST),
    broken_case("4.4", "a field larger than the table empties it",
        REQUEST + INDEXED_FIELD + b"\x40\x01c\x7f\xe1\x1e" + b"x" * 4064, REQUEST + FIRST),
    broken_case("4.4", "the oldest goes", b"\x3f\x03" + REQUEST + INDEXED_FIELD + b"\x40\x01c\x01d",
        REQUEST + b"\xbf"),
    valid_case("4.4", "the newest stays", b"\x3f\x03" + REQUEST + INDEXED_FIELD + b"\x40\x01c\x01d",
        REQUEST + FIRST),
    # --- numbers
    valid_case("5.1", "a length with needless zeros",
        REQUEST + b"\x00\x01a\x7f\x80\x80\x00" + b"x" * 127),
    broken_case("5.1", "a number without an end", REQUEST + b"\xff"),
    broken_case("5.1", "a number of many bytes", REQUEST + b"\xff" + b"\x80" * 20 + b"\x01"),
    broken_case("5.1", "a number larger than 2^32", REQUEST + b"\xff\xff\xff\xff\xff\xff\x01"),
    # --- strings
    valid_case("5.2", "Huffman's code", REQUEST + b"\x00\x81\x1f\x81\x8f"),  # "a": "b"
    broken_case("5.2", "a string longer than the block", REQUEST + b"\x00\x01a\x05b"),
    broken_case("5.2", "a name longer than the block", REQUEST + b"\x00\x05a"),
    broken_case("5.2", "no value", REQUEST + b"\x00\x01a"),
    broken_case("5.2", "more than seven bits of padding", REQUEST + b"\x00\x01a\x82\x1f\xff"),
    broken_case("5.2", "padding of a byte", REQUEST + b"\x00\x01a\x83\x1f\x8f\xff"),
    broken_case("5.2", "padding by zeros", REQUEST + b"\x00\x01a\x81\x18"),
    broken_case("5.2", "the code of the end", REQUEST + b"\x00\x01a\x84\x3f\xff\xff\xff"),
    broken_case("5.2", "the code of the end within",
        REQUEST + b"\x00\x01a\x85\x1f\xff\xff\xff\xff"),
    # --- fields
    broken_case("6.1", "index 0", REQUEST + b"\x80"),
    valid_case("6.2.1", "a name of the table", REQUEST + b"\x7b\x01x"),
    valid_case("6.2.2", "not kept", REQUEST + b"\x00\x01a\x01b\x0f\x0a\x01x"),
    valid_case("6.2.3", "never kept", REQUEST + b"\x10\x01a\x01b\x1f\x0a\x01x"),
    broken_case("6.2.2", "what is not kept is not in the table",
        REQUEST + b"\x00\x01a\x01b" + FIRST),
    broken_case("6.2.3", "what is never kept is not in the table",
        REQUEST + b"\x10\x01a\x01b" + FIRST),
    # --- updates of the table's size
    broken_case("6.3", "more than SETTINGS_HEADER_TABLE_SIZE", b"\x3f\xe2\x1f" + REQUEST),
    broken_case("6.3", "far more", b"\x3f\xff\xff\xff\x7f" + REQUEST),
    valid_case("6.3", "as much", b"\x3f\xe1\x1f" + REQUEST),
    broken_case("6.3", "an update without an end", b"\x3f"),
    broken_case("6.3", "a long update without an end", b"\x3f\x80"),
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
