"""The server's events for who watches its figures: states of models, and the newest of what
happened."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from shmserve.ipc import endpoints
from shmserve.ipc.messages import publications as m
from shmserve.ipc.transport.frames import unpack

_TOPICS = (m.MODELS, m.PROCESSES, m.REGIONS, m.HEALTH)
_MOST = 100


class EventWatch:
    """A subscriber. `states` has (state, reason) of each model version, those that do not serve
    too; `newest` the latest events, the last one last; `count` how many there have been."""

    def __init__(self, run_dir: Path) -> None:
        self.states: dict[tuple[str, str], tuple[str, str]] = {}
        self.newest: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self.count = 0
        self._mine = secrets.token_hex(8)
        self._known = asyncio.Event()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(endpoints.events(run_dir))
        for topic in (*_TOPICS, m.RECENT + self._mine, m.SNAPSHOT + self._mine):
            self._socket.subscribe(topic)
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def known(self, within_s: float) -> None:
        """Return when the server's state has come, or after so many seconds."""
        try:
            async with asyncio.timeout(within_s):
                await self._known.wait()
        except TimeoutError:
            pass  # nobody publishes events: what there is, is shown

    async def _read(self) -> None:
        while True:
            topic, frame = await self._socket.recv_multipart()
            header, *events = unpack(frame)
            for event in events:
                if type(event) is m.ModelChanged:
                    self._changed(event)
                if not topic.startswith(m.SNAPSHOT.encode()):
                    shown = {"time": header.time_ns / 1e9, "event": type(event).__name__}
                    self.newest.append(shown | asdict(event))
                    self.count += 1
            if topic.startswith(m.SNAPSHOT.encode()):
                self._known.set()

    def _changed(self, event: m.ModelChanged) -> None:
        key = event.name, event.version
        if event.state:
            self.states[key] = event.state, event.reason
        else:
            self.states.pop(key, None)

    def close(self) -> None:
        """Listen no more."""
        self._task.cancel()
        self._context.destroy(linger=0)
