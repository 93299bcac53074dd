"""gRPC messages: any split of the bytes gives the same messages, and malformed ones are refused."""

import asyncio
import gzip
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmserve.errors import Unavailable
from shmserve.gateway.grpc.framing import (
    LARGE_MESSAGE_BYTES,
    PREFIX,
    ArrivingMessage,
    Assembly,
    BrokenMessage,
    CallHead,
    ReceivedMessage,
    compress_in_pieces,
    compress_message,
    frame_message,
    inflate_message,
)
from shmserve.gateway.grpc.wire.response import LARGEST_MESSAGE
from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim

WINDOW = 1 << 20
HEAD = CallHead([(b":method", b"POST"), (b":path", b"/x"), (b"content-type", b"application/grpc")])
Sinks = Callable[[CallHead, int], Any]


def message(data: bytes, *, compressed: bool = False) -> bytes:
    return PREFIX.pack(compressed, len(data)) + data


def feed(assembly: Assembly, piece: bytes) -> list[ReceivedMessage]:
    assembly.feed(memoryview(piece))
    return list(iter(assembly.take_message, None))


def assemble(pieces: Sequence[bytes], sinks: Sinks | None = None) -> list[ReceivedMessage]:
    assembly = Assembly(WINDOW, HEAD, sinks)
    items = [received for piece in pieces for received in feed(assembly, piece)]
    assert not assembly.received_bytes
    return items


@given(
    st.lists(st.tuples(st.binary(max_size=200), st.booleans()), max_size=6),
    st.lists(st.integers(1, 300), min_size=1, max_size=10),
)
def test_messages_of_any_split_are_whole(sent: list[tuple[bytes, bool]], steps: list[int]) -> None:
    stream = b"".join(message(data, compressed=flag) for data, flag in sent)
    pieces: list[bytes] = []
    offset = 0
    while offset < len(stream):
        step = steps[len(pieces) % len(steps)]
        pieces.append(stream[offset : offset + step])
        offset += step
    assert assemble(pieces) == [(data, flag, 0) for data, flag in sent]


@given(
    st.lists(st.binary(max_size=60), max_size=12),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=10),
)
@example([b"", b"x"], [(5, 0), (1, 1)])
def test_messages_are_taken_later(sent_messages: list[bytes], steps: list[tuple[int, int]]) -> None:
    """Messages stay in order, copied from the buffer in which they arrived."""
    stream = b"".join(map(message, sent_messages))
    assembly = Assembly(WINDOW, HEAD, None)
    errors = []
    offset = count = 0
    while offset < len(stream):
        step, take_count = steps[count % len(steps)]
        buffer = bytearray(stream[offset : offset + step])
        assembly.feed(memoryview(buffer))
        errors += [
            received.data
            for received in (assembly.take_message() for _ in range(take_count))
            if received is not None
        ]
        assembly.keep_piece()
        buffer[:] = bytes(len(buffer))
        offset, count = offset + step, count + 1
    errors += [received.data for received in iter(assembly.take_message, None)]
    assert errors == sent_messages
    assert not assembly.received_bytes


def test_pieces_of_all_sizes_are_one_message() -> None:
    sizes = [1, 4095, 4096, 5000, 1, 1, 70000, 3]
    data = bytes(range(256)) * 400
    pieces = [data[sum(sizes[:index]) : sum(sizes[: index + 1])] for index in range(len(sizes))]
    pieces.append(data[sum(sizes) :])
    assert assemble([PREFIX.pack(0, len(data)), *pieces])[0].data == data


def test_tiny_pieces_use_no_additional_memory() -> None:
    """A message of a megabyte in pieces of a byte each."""
    assembly = Assembly(WINDOW, HEAD, None)
    feed(assembly, PREFIX.pack(0, 1 << 20))
    for _ in range((1 << 20) - 1):
        feed(assembly, b"x")
    assert sys.getsizeof(assembly._message) < 1.3 * (1 << 20)
    assert feed(assembly, b"x")[0].data == b"x" * (1 << 20)


def test_a_large_message_requests_a_window_update() -> None:
    """A message that fits needs nothing; of a larger one, all that the window might not hold."""
    for size in (0, 1, WINDOW - PREFIX.size):
        assembly = Assembly(WINDOW, HEAD, None)
        feed(assembly, PREFIX.pack(0, size))
        assert assembly.bytes_beyond_window == 0
    assembly = Assembly(WINDOW, HEAD, None)
    feed(assembly, PREFIX.pack(0, 10 * WINDOW))
    assert WINDOW + assembly.bytes_beyond_window == 10 * WINDOW + PREFIX.size
    assert assembly.received_bytes == PREFIX.size


@pytest.mark.parametrize("is_permitted", [False, True])
def test_a_message_reports_its_window_updates(is_permitted: bool) -> None:
    """A stream's reader subtracts them, since its window would otherwise grow with each message."""
    bytes_beyond_window = WINDOW + PREFIX.size
    assembly = Assembly(WINDOW, HEAD, None)
    for _ in range(2):
        data = message(bytes(2 * WINDOW))
        assert feed(assembly, data[:10]) == []
        assert assembly.bytes_beyond_window == bytes_beyond_window
        if is_permitted:
            assert (assembly.permit_rest(), assembly.permit_rest()) == (bytes_beyond_window, 0)
        (sent_message,) = feed(assembly, data[10:])
        assert sent_message.bytes_beyond_window == (bytes_beyond_window if is_permitted else 0)
        assert assembly.bytes_beyond_window == 0


@pytest.mark.parametrize("flag", [2, 3, 128, 255])
def test_an_unknown_flag_is_refused(flag: int) -> None:
    with pytest.raises(BrokenMessage) as caught:
        assemble([PREFIX.pack(flag, 0)])
    assert caught.value.code == "INTERNAL"


def test_a_message_that_is_too_large_is_refused() -> None:
    """The message is refused by its announced size, before memory is allocated."""
    feed(Assembly(WINDOW, HEAD, None), PREFIX.pack(0, LARGEST_MESSAGE))
    for size in (LARGEST_MESSAGE + 1, 2**32 - 1):
        with pytest.raises(BrokenMessage) as caught:
            assemble([PREFIX.pack(0, size)])
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert str(size) in caught.value.message


class KeepingSink:
    """A sink that keeps what it is fed."""

    def __init__(self) -> None:
        self.data = b""
        self.dropped = False

    def next_buffer(self, max_size: int) -> memoryview | None:
        return None

    def feed(self, piece: memoryview) -> None:
        self.data += piece

    def finish(self) -> bytes:
        return self.data

    def discard(self) -> None:
        self.dropped = True


def test_large_messages_are_received_by_a_sink() -> None:
    pending_calls: list[int] = []
    sinks: list[KeepingSink] = []

    def find(head: CallHead, size: int) -> KeepingSink | None:
        assert head is HEAD
        pending_calls.append(size)
        if len(pending_calls) == 2:
            return None
        sinks.append(KeepingSink())
        return sinks[-1]

    sent = [
        b"small",
        bytes(LARGE_MESSAGE_BYTES),
        b"x" * (LARGE_MESSAGE_BYTES + 1),
        b"y" * (2 * LARGE_MESSAGE_BYTES),
    ]
    stream = b"".join(map(message, sent)) + message(bytes(LARGE_MESSAGE_BYTES), compressed=True)
    pieces = [stream[offset : offset + 1000] for offset in range(0, len(stream), 1000)]
    parts: list[Any] = [received.data for received in assemble(pieces, find)]
    assert parts == [*sent, bytes(LARGE_MESSAGE_BYTES)]
    assert pending_calls == [LARGE_MESSAGE_BYTES, LARGE_MESSAGE_BYTES + 1, 2 * LARGE_MESSAGE_BYTES]
    assert [len(sink.data) for sink in sinks] == [LARGE_MESSAGE_BYTES, 2 * LARGE_MESSAGE_BYTES]
    assert not any(sink.dropped for sink in sinks)


def test_a_dropped_message_releases_its_sink() -> None:
    sink: Any = KeepingSink()
    assembly = Assembly(WINDOW, HEAD, lambda *_: sink)
    feed(assembly, PREFIX.pack(0, LARGE_MESSAGE_BYTES) + b"some")
    assembly.discard()
    assembly.discard()
    assert sink.dropped and sink.data == b"some"


def inflate(data: bytes, encoding: str, limit: int = 1 << 20) -> bytes:
    return asyncio.run(inflate_message(data, encoding, limit, BodyBudget(limit, MallocTrim())))


@given(st.binary(max_size=2000), st.sampled_from(["gzip", "deflate"]), st.integers(0, 9))
def test_compressed_messages_are_inflated(data: bytes, encoding: str, level: int) -> None:
    prefix, compressed_data = compress_message(data, encoding, level)
    flag, size = PREFIX.unpack(prefix)
    assert size == len(compressed_data)
    assert (inflate(compressed_data, encoding) if flag else compressed_data) == data
    assert len(compressed_data) <= len(data)


@pytest.mark.parametrize("size", [0, 1, LARGE_MESSAGE_BYTES, 3 * LARGE_MESSAGE_BYTES + 5])
async def test_a_large_message_is_deflated_in_turns(size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    turn_count = 0
    task = asyncio.ensure_future(compress_in_pieces(data, "gzip", 6))
    while not task.done():
        turn_count += 1
        await asyncio.sleep(0)
    prefix, compressed_data = await task
    flag, length = PREFIX.unpack(prefix)
    assert length == len(compressed_data) <= len(data)
    assert (gzip.decompress(compressed_data) if flag else compressed_data) == data
    assert turn_count >= size // LARGE_MESSAGE_BYTES


def test_encodings_have_their_standard_formats() -> None:
    data = b"abc" * 1000
    assert gzip.decompress(compress_message(data, "gzip", 6)[1]) == data
    assert zlib.decompress(compress_message(data, "deflate", 6)[1]) == data


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_decompression_bomb_is_refused(encoding: str) -> None:
    """A message that inflates beyond the limit is refused, however few bytes are sent."""
    _, decompression_bomb = compress_message(bytes(50 << 20), encoding, 9)
    with pytest.raises(BrokenMessage) as caught:
        inflate(decompression_bomb, encoding, 1 << 20)
    assert caught.value.code == "RESOURCE_EXHAUSTED"


async def test_concurrent_decompression_bombs_are_refused() -> None:
    """Each message is within the limit, but their sum exceeds the budget."""
    size = 4 << 20
    _, decompression_bomb = compress_message(bytes(size), "gzip", 9)
    budget = BodyBudget(2 * size, MallocTrim())
    bombs = (inflate_message(decompression_bomb, "gzip", size, budget) for _ in range(20))
    results = await asyncio.gather(*bombs, return_exceptions=True)
    assert budget._used_bytes == 0
    decompressed = [received for received in results if received == bytes(size)]
    refusals = [received for received in results if isinstance(received, Unavailable)]
    assert len(decompressed) >= 1
    assert len(refusals) >= 17
    assert len(decompressed) + len(refusals) == 20


def test_data_in_another_encoding_is_refused() -> None:
    compressed = gzip.compress(b"x" * 100)
    for broken_data in (b"", b"x", compressed[:-1], compressed[:5], compressed[:-4] + b"1234"):
        with pytest.raises(BrokenMessage):
            inflate(broken_data, "gzip")
    with pytest.raises(BrokenMessage) as caught:
        inflate(compressed, "identity")
    assert caught.value.code == "INTERNAL"


def test_a_framed_message() -> None:
    assert frame_message(b"abc") == (b"\0\0\0\0\3", b"abc")
    assert frame_message(b"") == (bytes(5), b"")


def test_a_slow_message_is_evicted() -> None:
    evictions: list[int] = []
    budget = BodyBudget(1000, MallocTrim())
    arriving = ArrivingMessage(10.0, budget, lambda: evictions.append(1))
    arriving.reserve(500)
    assert not arriving.is_slow(arriving.started_at + 0.1)
    assert arriving.is_slow(arriving.started_at + 1.0)
    arriving.evict()
    assert evictions == [1]


def test_the_time_limit_grows_with_received_bytes() -> None:
    arriving = ArrivingMessage(10.0, BodyBudget(1000, MallocTrim()), lambda: None)
    assert not arriving.is_overdue(arriving.started_at + 9)
    assert arriving.is_overdue(arriving.started_at + 11)
    arriving.received_bytes += 10 << 20
    assert not arriving.is_overdue(arriving.started_at + 100)
