"""Back-pressure of a connection, both ways.

Writing waits while the client reads more slowly than we write. A connection is not read while the
stream of a body is full, or while too many pipelined requests are queued.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from shmserve.common.tasks import settle
from shmserve.gateway.http.connection.aiohttp_parts import make_parser

_MOST_QUEUED = 32


class FlowControl(asyncio.Protocol):
    """A connection's transport, once it is made, and the parser that reads it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = make_parser(self, loop, _MOST_QUEUED)
        self.transport: asyncio.Transport | None = None
        self.writing_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._stream_full = False
        self._too_many = False  # requests are queued
        self._reading_paused = False

    @abstractmethod
    def _parse_rest(self) -> int:
        """Parse what has come and was not parsed yet; how many requests are queued."""

    @property
    def connected(self) -> bool:
        """Whether there is a client."""
        return self.transport is not None

    # --- writing

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self.writing_paused = True

    def resume_writing(self) -> None:
        """The client has caught up, or is gone."""
        self.writing_paused = False
        drained, self._drained = self._drained, None
        settle(drained, None)

    async def drain(self) -> None:
        """Wait until the client has read what was written; raises ConnectionError."""
        if self.writing_paused and self.transport is not None:
            self._drained = self._loop.create_future()
            await self._drained
        if self.transport is None:
            raise ConnectionResetError("the client is gone")

    # --- reading, as the parser and its streams ask for it

    def pause_reading(self) -> None:
        """The stream of a body is full."""
        self._stream_full = True
        self._parser.pause_reading()
        self._set_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """The stream of a body is not full any more, or has ended."""
        if self._stream_full:
            self._stream_full = False
            if resume_parser:
                self._parse_rest()
            self._set_reading()

    def _queued(self, count: int) -> None:
        """So many requests are queued now."""
        if count >= _MOST_QUEUED:
            self._too_many = True
            self._set_reading()

    def _dequeued(self, count: int) -> None:
        """One request less is queued: `count` are."""
        self._parser.message_consumed()
        if self._too_many and count <= _MOST_QUEUED // 2:
            self._too_many = self._parse_rest() >= _MOST_QUEUED
            self._set_reading()

    def _set_reading(self) -> None:
        paused = self._stream_full or self._too_many
        if paused is not self._reading_paused and self.transport is not None:
            self._reading_paused = paused
            if paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()
