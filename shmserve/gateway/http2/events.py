"""What the bytes of a client mean to whoever handles streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from shmserve.gateway.http2.header_blocks import T
from shmserve.gateway.http2.outgoing import Stream


@dataclass(slots=True, eq=False)
class Begun(Generic[T]):
    """A stream has begun; `head` is what the head's reader made of its request."""

    stream: Stream
    head: T


@dataclass(slots=True, eq=False)
class Data:
    """A piece of a stream's data, of any size; with `ended` the last, which may be empty."""

    stream: Stream
    piece: memoryview
    ended: bool


@dataclass(slots=True, eq=False)
class StreamReset:
    """A stream is over: the client has given it up, or has broken a rule on it."""

    stream: Stream


@dataclass(slots=True, eq=False)
class PingAnswered:
    """The client has answered a ping of ours."""

    payload: bytes


Event = Begun[T] | Data | StreamReset | PingAnswered
