"""The steps in flight of an ensemble's requests, and the links to their schedulers."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shmserve.errors import Internal, ShmserveError
from shmserve.ipc.messages.inference import (
    Cancel,
    Credit,
    Failed,
    Finished,
    Release,
    Responded,
    SchedulerToClient,
    Submit,
    message_size,
)
from shmserve.ipc.scheduler_client import Links, SchedulerClient
from shmserve.ipc.trace import TraceContext, TracedTensor, unpack_spans
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.ipc.transport.zmtp import LinkTable
from shmserve.scheduler.ensemble.flow import Firing, Graph, Targets
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.request import RUNNING, EnsembleRequest, EnsembleRequests
from shmserve.scheduler.ensemble.step_messages import StepMessages, StepRequest

logger = logging.getLogger(__name__)

_MAX_SPAN_BYTES = 1 << 27  # bytes per request, since the size of a message is limited


@dataclass(eq=False)
class StepRunner:
    """The submitter of all requests' steps, which wait while too many are in flight.

    Attributes:
        malformed_messages: The number of responses of steps that could not be read.
    """

    _graph: Graph
    _targets: Targets
    _step_links: Links
    _memory: EnsembleMemory
    _requests: EnsembleRequests
    _submit_numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    waiting_count: int = 0  # steps that wait because of `max_inflight_requests`
    malformed_messages: int = 0  # responses of steps that could not be read

    def __post_init__(self) -> None:
        steps = self._graph.steps
        self.schedulers: SchedulerClient[StepRequest] = SchedulerClient(
            self._step_links, self._find_endpoint
        )
        self._messages = StepMessages(self._graph, self._memory, self.schedulers)
        self._in_flight = [0] * len(steps)  # requests in flight by step index
        self._waiting_firings: list[deque[tuple[EnsembleRequest, Firing]]] = [
            deque() for _ in steps
        ]

    # --- from the schedulers ----------------------------------------------------------------------

    def receive(self, endpoint: str, message: SchedulerToClient, now_ns: int) -> None:
        """Handle a message of the scheduler at `endpoint`."""
        step = None
        if type(message) is Finished:
            step = self.schedulers.remove_finished(endpoint, message)
        if step is None:
            self.schedulers.handle(endpoint, message)
        else:
            self._requests.changed_requests[step.request] = None
            self._add_response(step, message, now_ns)  # type: ignore[arg-type]
            self._end_step(step, now_ns)
        if self._messages.step_events:
            self._handle_events(now_ns)

    def resubmit(self, endpoint: str, successor: str, now_ns: int) -> None:
        """Resubmit the requests of a lost scheduler to the current schedulers of their models."""
        self._targets.replace_scheduler(endpoint, successor)
        self.schedulers.successors.add(endpoint, successor)
        self.schedulers.handle_loss(endpoint)
        self._handle_events(now_ns)

    def _find_endpoint(self, step: StepRequest, _: Failed | None) -> str:
        """Return the endpoint of the scheduler that serves the model of a step now."""
        try:
            return self._targets.find(step.firing.step.node).endpoint
        except ShmserveError:
            return ""

    def _handle_events(self, now_ns: int) -> None:
        """Handle the events of steps; a step submitted meanwhile may fail and add events."""
        events = self._messages.step_events
        while events:
            step, message = events.pop(0)
            self._requests.changed_requests[step.request] = None
            if message is None:
                self._end_step(step, now_ns)
            elif type(message) is Failed:
                self._fail(step, message, now_ns)
            else:
                self._add_response(step, message, now_ns)  # type: ignore[arg-type]

    def _add_response(self, step: StepRequest, message: Finished | Responded, now_ns: int) -> None:
        request = step.request
        request.input_ns += message.input_ns
        request.infer_ns += message.infer_ns
        request.output_ns += message.output_ns
        if message.spans:
            self._add_spans(step, message.spans)
        more_follow = type(message) is Responded and not message.final
        if type(message) is Responded and message.code:
            self._requests.fail(request, message.code, message.message, now_ns)
        elif message.schema:
            try:
                self._messages.store_outputs(step, message, more_follow)
                return
            except ShmserveError as error:
                self._requests.fail(request, error.code, error.message, now_ns)
                return
            except MalformedMessage as error:
                self.malformed_messages += 1
                model = step.firing.step.node.model
                logger.error(
                    "model '%s': a response is malformed, so its request fails: %s", model, error
                )
                self._requests.fail(request, Internal.code, Internal().message, now_ns)
        if more_follow:
            self.schedulers.credit(step, 1)

    def _add_spans(self, step: StepRequest, spans: bytes) -> None:
        """Record a step's spans.

        Traced tensors that are inputs or outputs of the ensemble are recorded in its span, too.
        """
        request, node = step.request, step.firing.step.node
        if len(request.spans) + len(spans) > _MAX_SPAN_BYTES:
            return
        request.spans += spans
        context = TraceContext.of(step.submit.trace)
        if not context.with_tensors:
            return
        traced_tensors: list[TracedTensor] = []
        unpack_spans(spans, traced_tensors)
        for tensor in traced_tensors:
            model_tensors, ensemble_tensors = node.inputs, self._graph.inputs
            if tensor.is_output:
                model_tensors, ensemble_tensors = node.outputs, self._graph.outputs
            name = model_tensors.get(tensor.name)
            if tensor.span_id == context.span_id and name in ensemble_tensors:
                ensemble_tensor = tensor._replace(span_id=context.parent_id, name=name)
                request.spans += ensemble_tensor.packed()

    def _fail(self, step: StepRequest, message: Failed, now_ns: int) -> None:
        request = step.request
        if message.spans:
            self._add_spans(step, message.spans)
        code, text, retry_after_s = message.code, message.message, message.retry_after_s
        self._requests.fail(request, code, text, now_ns, retry_after_s)
        if message.early:
            self._requests.report_early(request)
            self.cancel(request)

    def _end_step(self, step: StepRequest, now_ns: int) -> None:
        """End a step whose request no worker uses any more."""
        request, index = step.request, step.firing.step.index
        for value in step.firing.inputs.values():
            value.release()
        if step.blocks:
            for block in step.blocks.values():
                block.release()
            step.blocks.clear()
        request.running_ids.discard(step.submit.id)
        self._in_flight[index] -= 1
        if self._waiting_firings[index]:
            self._run_waiting(index, now_ns)

    # --- to the schedulers ------------------------------------------------------------------------

    def run(self, request: EnsembleRequest, now_ns: int) -> None:
        """Submit the steps of a request that are ready, up to `max_inflight_requests`."""
        max_inflight, in_flight = self._graph.max_inflight, self._in_flight
        firings = request.flow.firings
        while firings and request.state is RUNNING:
            firing = firings.pop(0)
            index = firing.step.index
            if max_inflight and in_flight[index] >= max_inflight:
                self._waiting_firings[index].append((request, firing))
                request.waiting_count += 1
                self.waiting_count += 1
            else:
                self._submit(request, firing, now_ns)
        if self._messages.step_events:
            self._handle_events(now_ns)

    def _run_waiting(self, step_index: int, now_ns: int) -> None:
        waiting_firings = self._waiting_firings[step_index]
        while waiting_firings and self._in_flight[step_index] < self._graph.max_inflight:
            request, firing = waiting_firings.popleft()
            request.waiting_count -= 1
            self.waiting_count -= 1
            self._requests.changed_requests[request] = None
            if request.state is RUNNING:
                self._submit(request, firing, now_ns)
            else:
                firing.release()

    def _submit(self, request: EnsembleRequest, firing: Firing, now_ns: int) -> None:
        submit_number = next(self._submit_numbers)
        try:
            target = self._targets.find(firing.step.node)
            step = self._messages.request(submit_number, request, firing, target, now_ns)
        except ShmserveError as error:
            firing.release()
            self._requests.fail(request, error.code, error.message, now_ns)
            return
        request.running_ids.add(submit_number)
        self._in_flight[firing.step.index] += 1
        self.schedulers.submit(step, target.endpoint)

    def cancel(self, request: EnsembleRequest) -> None:
        """Cancel the steps of a request that has failed, in flight or waiting."""
        self._requests.changed_requests[request] = None
        for number in request.running_ids:
            step = self.schedulers.pending.get(number)
            if step is not None:
                self.schedulers.cancel(step)

    def remove_waiting(self, request: EnsembleRequest) -> None:
        """Remove a request's waiting steps, which will not run."""
        if not request.waiting_count:
            return
        for index, waiting_firings in enumerate(self._waiting_firings):
            firings = [firing for owner, firing in waiting_firings if owner is request]
            if firings:
                self._waiting_firings[index] = deque(
                    entry for entry in waiting_firings if entry[0] is not request
                )
            for firing in firings:
                firing.release()
        self.waiting_count -= request.waiting_count
        request.waiting_count = 0


# The arguments are the sender's address and its message.
Handler = Callable[[Any, Any], None]


class InProcessLinks:
    """Links between the schedulers of one process.

    A message is passed to the handler of its address without being packed. A scheduler receives
    requests at its endpoint, and an ensemble receives responses at its identity. A request is
    delivered immediately. Responses are delivered later, in the order of posting, so that no
    handler of a scheduler is called within another handler of the same scheduler.
    """

    def __init__(self) -> None:
        self._handlers: dict[Hashable, Handler] = {}
        self.queued_messages: list[tuple[Handler, Any, Any]] = []

    def register(self, address: Hashable, handler: Handler) -> None:
        """Register the message handler of an address."""
        self._handlers[address] = handler

    def remove(self, address: Hashable) -> None:
        """Remove an address; messages that were posted to it are still delivered."""
        del self._handlers[address]

    def is_registered(self, address: Hashable) -> bool:
        """Check whether an address is registered."""
        return address in self._handlers

    def call(self, address: Hashable, sender: Any, message: Any) -> bool:
        """Deliver a client's message immediately; return False if `address` is not registered."""
        handler = self._handlers.get(address)
        if handler is None:
            return False
        handler(sender, message)
        return True

    def post(self, address: Hashable, sender: Any, message: Any) -> bool:
        """Queue a response; return False if the address is not registered."""
        handler = self._handlers.get(address)
        if handler is None:
            return False
        self.queued_messages.append((handler, sender, message))
        return True

    def deliver(self) -> None:
        """Pass the queued responses to the handlers of their clients."""
        queued_messages, self.queued_messages = self.queued_messages, []
        for handler, sender, message in queued_messages:
            handler(sender, message)


@dataclass(eq=False)
class StepLinks(Links):
    """The links of an ensemble to the schedulers of its steps (`Links`).

    A scheduler in the same process is called directly; other schedulers have sockets.

    Attributes:
        _watch_fd: Watches a descriptor, given the handler for readable data.
        _unwatch_fd: Stops watching a descriptor.
        _own_address: The ensemble's address in this process.
        _receive_message: Receives the endpoint and each message of a scheduler.
    """

    _watch_fd: Callable[[int, Callable[[], None]], None]
    _unwatch_fd: Callable[[int], None]
    _in_process_links: InProcessLinks
    _own_address: bytes
    _receive_message: Callable[[str, Any], None]

    def __post_init__(self) -> None:
        name = f"{os.getpid()}.{secrets.token_hex(8)}"
        self._links = LinkTable(name, self._watch, self._unwatch_fd)
        self._in_process_links.register(self._own_address, self._receive_message)

    def _watch(self, fd: int) -> None:
        self._watch_fd(fd, partial(self._receive, fd))

    def _receive(self, fd: int) -> None:
        link = self._links.find_by_fd(fd)
        assert link is not None
        for message in link.receive():
            self._receive_message(link.endpoint, message)

    def open(self, endpoint: str) -> None:
        if not self._in_process_links.is_registered(endpoint):
            self._links.open(endpoint)

    def queue(self, endpoint: str, message: Submit, byte_size: int) -> None:
        if not self._in_process_links.call(endpoint, self._own_address, message):
            self._links.queue(endpoint, message, byte_size or message_size(message))

    def post(self, endpoint: str, message: Cancel | Credit | Release) -> None:
        if not self._in_process_links.call(endpoint, self._own_address, message):
            self._links.post(endpoint, message)

    defer = post  # all queued messages are sent at the end of the turn

    def drain(self, endpoint: str, receive: Callable[[str, Any], None]) -> None:
        self._links.drain(endpoint, receive)

    @property
    def pending(self) -> Sized:
        """Return the links with queued messages."""
        return self._links.pending

    def flush(self) -> None:
        """Send the queued messages."""
        self._links.flush()

    def close(self, linger_s: float = 0.0) -> None:
        """Close every link."""
        self._in_process_links.remove(self._own_address)
        self._links.close_all()
