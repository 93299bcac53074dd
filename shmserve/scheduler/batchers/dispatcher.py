"""The interface of dispatchers of requests to the instances: one for each kind of scheduling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from shmserve.ipc.messages.inference import Submit
from shmserve.scheduler.instances.executions import Executions
from shmserve.scheduler.instances.pool import Lost, Pool, Slot
from shmserve.scheduler.instances.tickets import InstanceTickets
from shmserve.scheduler.requests.client import Client
from shmserve.scheduler.requests.queue import EXPIRED, RequestQueue
from shmserve.scheduler.requests.request import ScheduledRequest
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.settings import Settings


class SequenceKey(NamedTuple):
    """The sequence that a request belongs to, and its flags there."""

    correlation_id: int | str
    flags: int


@dataclass(eq=False)
class Dispatcher(ABC):
    """Starts what can run. Requests need not belong to anything unless a kind says so."""

    _settings: Settings
    _queue: RequestQueue
    _pool: Pool
    _executions: Executions
    _responses: Responses
    _tickets: InstanceTickets | None

    @abstractmethod
    def run(self, now_ns: int) -> int:
        """Start all that can; returns when to try again if nothing happens before."""

    @abstractmethod
    def flush(self) -> None:
        """Nothing more comes that would be worth waiting for."""

    def identify(self, client: Client[ScheduledRequest], message: Submit) -> SequenceKey | None:
        """The sequence that a request belongs to, before it is admitted to the queue.

        Raises InvalidArgument or QueueFull for one that may not be.
        """
        return None

    def enqueued(self, request: ScheduledRequest, sequence_key: SequenceKey | None) -> None:  # noqa: B027
        """A request is in the queue."""

    def removed(  # noqa: B027
        self, request: ScheduledRequest, now_ns: int, *, expired: bool = False, apart: bool = False
    ) -> None:
        """A request was taken out of the queue, for ever; what cannot run without it fails, unless
        it is dealt with `apart`."""

    def again(self, request: ScheduledRequest) -> bool:
        """Its model has asked for an executed request once more; whether it gets it."""
        return False

    def from_worker(self, slot: Slot, message: Any, now_ns: int) -> bool:
        """Take a message that only this kind of scheduling knows; whether it makes sense."""
        return False

    def kept(self, lost: Lost) -> Lost:
        """What a dead instance had, without what this kind lets go on elsewhere."""
        return lost

    def gauges(self) -> dict[str, Any]:
        """What is so now of this kind's own."""
        return {}

    def lost_text(self, request: ScheduledRequest) -> str:
        """Why a request whose worker died in the middle cannot run again; "": it may."""
        return ""

    def expired_text(self, request: ScheduledRequest) -> str:
        """The error text for a request whose time is over while it waits."""
        return EXPIRED

    def needs(self, slot: Slot) -> bool:
        """Whether an instance that is to retire has more to do than it was given."""
        return False

    @property
    def open_sequences(self) -> int:
        """The number of sequences that have begun and not ended."""
        return 0

    def accepts_while_draining(self, message: Submit) -> bool:
        """Whether a request may come while the model is being stopped."""
        return False
