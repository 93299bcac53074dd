"""RFC 9113 by section: requests, their fields and their trailers."""

import pytest

from shmserve.gateway.http2.frames import FaultCode
from shmserve.gateway.http2.header_blocks import encode_block
from tests.support.wire.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, frame
from tests.support.wire.http2_engine import Case

Fields = tuple[tuple[bytes, bytes], ...]

MALFORMED = ((1, FaultCode.PROTOCOL_ERROR),)
METHOD, SCHEME, PATH = (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x")
PSEUDO = (METHOD, SCHEME, PATH)


def request(*fields: tuple[bytes, bytes], end: bool = False, pseudo: Fields = PSEUDO) -> bytes:
    return frame(HEADERS, END_HEADERS | end, 1, encode_block((*pseudo, *fields)))


def data_frame(size: int, *, end: bool = True) -> bytes:
    return frame(DATA, END_STREAM if end else 0, 1, bytes(size))


def trailers_frame(*fields: tuple[bytes, bytes]) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, 1, encode_block(fields))


def valid_case(section: str, title: str, sent_bytes: bytes, size: int = 0) -> Case:
    return Case(section, title, sent_bytes, served=((1, bytes(size)),))


def malformed_case(section: str, title: str, sent_bytes: bytes) -> Case:
    return Case(section, title, sent_bytes, resets=MALFORMED)


def content_length(value: bytes) -> tuple[bytes, bytes]:
    return (b"content-length", value)


CASES = [
    # --- the frames of a request
    valid_case("8.1", "HEADERS", request(end=True)),
    valid_case("8.1", "HEADERS and DATA", request() + data_frame(5, end=False) + data_frame(3), 8),
    valid_case("8.1", "trailers",
        request() + data_frame(5, end=False) + trailers_frame((b"a", b"b")), 5),
    valid_case("8.1", "trailers without data", request() + trailers_frame((b"a", b"b"))),
    malformed_case("8.1", "HEADERS that end nothing", request() + request(pseudo=())),
    malformed_case("8.1", "trailers that end nothing",
        request() + data_frame(5, end=False) + request()),
    malformed_case("8.1", "a pseudo-header in trailers", request() + trailers_frame(METHOD)),
    malformed_case("8.1", "a name in capitals in trailers",
        request() + trailers_frame((b"A", b"b"))),
    valid_case("8.1", "the connection's field in trailers",
        request() + trailers_frame((b"upgrade", b"x"))),
    # --- content-length
    valid_case("8.1.1", "what it says",
        request(content_length(b"8")) + data_frame(5, end=False) + data_frame(3), 8),
    valid_case("8.1.1", "what it says, with trailers",
        request(content_length(b"5")) + data_frame(5, end=False) + trailers_frame(), 5),
    valid_case("8.1.1", "nothing", request(content_length(b"0"), end=True)),
    valid_case("8.1.1", "nothing, in DATA", request(content_length(b"0")) + data_frame(0)),
    valid_case("8.1.1", "the same twice",
        request(content_length(b"5"), content_length(b"5")) + data_frame(5), 5),
    malformed_case("8.1.1", "less than it says", request(content_length(b"8")) + data_frame(5)),
    malformed_case("8.1.1", "less in several",
        request(content_length(b"8")) + data_frame(5, end=False) + data_frame(2)),
    malformed_case("8.1.1", "more than it says", request(content_length(b"4")) + data_frame(5)),
    malformed_case("8.1.1", "more in several",
        request(content_length(b"8")) + data_frame(5, end=False) * 2),
    malformed_case("8.1.1", "less, and trailers",
        request(content_length(b"8")) + data_frame(5, end=False) + trailers_frame()),
    malformed_case("8.1.1", "an end where it says some", request(content_length(b"8"), end=True)),
    malformed_case("8.1.1", "two of them",
        request(content_length(b"5"), content_length(b"6")) + data_frame(5)),
    # --- fields
    valid_case("8.2", "bytes that are not ASCII", request((b"a", b"\xff\x80"), end=True)),
    valid_case("8.2", "an empty value", request((b"a", b""), end=True)),
    valid_case("8.2", "all characters of names", request((b"!#$%&'*+-.^_`|~09az", b"x"), end=True)),
    *(malformed_case("8.2", f"a name in capitals: {name!r}",
        request((name, b"x"), end=True)) for name in (b"A", b"aBc", b"Content-Type", b"Z" * 20)),
    *(malformed_case("8.2.1", f"a name with {name!r}",
        request((b"a%bb" % name, b"x"), end=True)) for name in (b"\0", b" ", b"\n", b"\r", b"\x7f",
        b"\x80", b"\xff", b":", b"(", b'"', b"\t")),
    malformed_case("8.2.1", "no name", request((b"", b"x"), end=True)),
    *(malformed_case("8.2.1", f"a value with {value!r}",
        request((b"a", value), end=True)) for value in (b"x\0", b"\nx", b"x\ry", b"x\r\ny")),
    *(valid_case("8.2.1", f"blanks around a value, {value!r}",
        request((b"a", value), end=True)) for value in (b" x", b"x ", b"\tx", b"x\t", b" \t ")),
    valid_case("8.2.1", "blanks around a length", request(content_length(b" 5\t")) + data_frame(5),
        5),
    valid_case("8.2.1", "blanks in trailers", request() + trailers_frame((b"a", b" b "))),
    valid_case("8.2.1", "blanks within a value", request((b"a", b"x y\tz"), end=True)),
    *(valid_case("8.2.2", f"the connection's {name!r} is ignored",
        request((name, b"x"), end=True)) for name in (*(b"connection", b"keep-alive",
        b"proxy-connection", b"transfer-encoding", b"upgrade"), )),
    valid_case("8.2.2", "te: trailers", request((b"te", b"trailers"), end=True)),
    valid_case("8.2.2", "te in capitals", request((b"te", b" Trailers"), end=True)),
    malformed_case("8.2.2", "another te", request((b"te", b"trailers, deflate"), end=True)),
    malformed_case("8.2.2", "no te", request((b"te", b""), end=True)),
    valid_case("8.2.3", "cookies in several",
        request((b"cookie", b"a=b"), (b"cookie", b"c=d"), end=True)),
    # --- pseudo-headers
    malformed_case("8.3", "one that there is not",
        request(pseudo=(*PSEUDO, (b":test", b"x")), end=True)),
    malformed_case("8.3", "one of a response",
        request(pseudo=(*PSEUDO, (b":status", b"200")), end=True)),
    malformed_case("8.3", "one behind other fields",
        request(METHOD, pseudo=((b"a", b"b"), ), end=True)),
    malformed_case("8.3", "the last behind other fields",
        request((b"a", b"b"), PATH, pseudo=PSEUDO[:2], end=True)),
    malformed_case("8.3", "one in capitals",
        request(pseudo=(*PSEUDO[:2], (b":Path", b"/x")), end=True)),
    malformed_case("8.3", "no name but a colon", request(pseudo=(*PSEUDO, (b":", b"x")), end=True)),
    valid_case("8.3.1", "another order", request(pseudo=PSEUDO[::-1], end=True)),
    valid_case("8.3.1", "an authority",
        request(pseudo=(*PSEUDO, (b":authority", b"x:1")), end=True)),
    valid_case("8.3.1", "a host besides", request((b"host", b"x:1"), end=True)),
    *(malformed_case("8.3.1", f"no {name!r}",
        request(pseudo=tuple(item for item in PSEUDO if item[0] != name))) for name, _ in PSEUDO),
    *(malformed_case("8.3.1", f"{item[0]!r} twice",
        request(pseudo=(*PSEUDO, item), end=True)) for item in (*PSEUDO, )),
    malformed_case("8.3.1", "two authorities",
        request(pseudo=(*PSEUDO, *[(b":authority", b"x")] * 2))),
    *(malformed_case("8.3.1", f"an empty {name!r}",
        request(pseudo=tuple((n, v[: 9 * (n != name)]) for n, v in PSEUDO))) for name, _ in PSEUDO),
    malformed_case("8.3.1", "a blank in front of the path",
        request(pseudo=(*PSEUDO[:2], (b":path", b" /")))),
    malformed_case("8.3.1", "a line's end in the path",
        request(pseudo=(*PSEUDO[:2], (b":path", b"/\r\nx")))),
    malformed_case("8.3.1", "no fields", request(pseudo=(), end=True)),
    # --- CONNECT, which there is not
    malformed_case("8.5", "CONNECT",
        request(pseudo=((b":method", b"CONNECT"), (b":authority", b"x:1")))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_section(case: Case) -> None:
    case.check()
