"""Validation of requests of local clients, which no gateway has validated.

A gateway belongs to the server and is trusted; a local client is not. The identity of a client must
contain its token, and the memory that a request refers to must be the client's own. The rows of a
request in a batch are computed from the request itself.

No gateway measures these requests either. They are sampled for traces. If there is a limit for
slow requests, all of them are measured, and slow requests are reported.

    begin ──> Submit.trace ... response ──ended──> RequestTraced, to the supervisor
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.common.peers import NO_GROUP, admit_group
from shmserve.common.trace_settings import Sampler, TraceSettings
from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import MAX_LINKS, MAX_REQUEST_BYTES, Capabilities
from shmserve.ipc.messages.inference import (
    MAX_TIMEOUT_US,
    Failed,
    Finished,
    Responded,
    Submit,
    message_size,
)
from shmserve.ipc.messages.supervision import RequestTraced, SchedulerStart, SetTracing
from shmserve.ipc.processes import trim_heap
from shmserve.ipc.tensors.descriptors import Memory, Range, unpack_range
from shmserve.ipc.tensors.schemas import LONGEST_CORRELATION_ID, RequestSchema, Schemas
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.trace import TraceContext, is_encoded_trace
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.ipc.transport.router import UntrustedRouter, leading_pid
from shmserve.scheduler.requests.scheduled import ControlLink

_REMEMBERED_EXITS = 4096  # numbers of exited clients that are remembered
_MAX_MEMORIES = 4096  # regions whose owner was verified
# The longest plausible transit time of a request from a local client. A longer time would distort
# the statistics of all clients.
_MAX_TRANSIT_NS = 1_000_000_000
_NS_PER_MS = 1_000_000


class LocalClientListener:
    """The listener of a scheduler for local clients, with the `router` of their links.

    `limit_us` is the server's time limit from a request's arrival to its last response (0: none).
    """

    def __init__(
        self, endpoint: str, capabilities: Capabilities, signature: Signature, limit_us: int = 0
    ) -> None:
        self._exited_client_numbers: deque[int] = deque(maxlen=_REMEMBERED_EXITS)
        self.router = UntrustedRouter(endpoint, self._may_connect)
        self._capabilities = capabilities
        self._rules = LocalClientRules(capabilities, signature, limit_us)

    @classmethod
    def open(cls, start: SchedulerStart, signature: Signature) -> LocalClientListener:
        """Open the listener of a scheduler; programs of the server's group can connect."""
        endpoint = endpoints.local_clients(start.run_dir, start.number)
        key, limit_us = Capabilities(start.capability_key), start.limits.request_timeout_us
        listener = cls(endpoint, key, signature, limit_us)
        if start.group != NO_GROUP:
            admit_group(Path(endpoint.removeprefix("ipc://")), start.group)
        return listener

    def check(self, peer: bytes, message: Any, now_ns: int) -> Any:
        """Return the verified message, or None if it was rejected and answered."""
        if type(message) is not Submit:
            return message
        try:
            return self._rules.validate(_client_number(peer), message, now_ns)
        except ShmserveError as error:
            self.router.post(peer, Failed(message.id, error.code, error.message, 0, False))
        except MalformedMessage:
            text = "the request is malformed: see `shmserve guide protocol`"
            self.router.post(peer, Failed(message.id, InvalidArgument.code, text, 0, False))
        return None

    def _may_connect(self, peer: bytes) -> bool:
        number = self._capabilities.local_client(peer)
        if not number or number in self._exited_client_numbers:
            return False
        client_links = [peer for peer in self.router.peers() if _client_number(peer) == number]
        return len(client_links) < MAX_LINKS

    def process_exited(self, client_number: int) -> None:
        """Remove the links of a local client that has exited."""
        self._exited_client_numbers.append(client_number)
        for peer in self.router.peers():
            if _client_number(peer) == client_number:
                self.router.disconnect(peer)
        self._rules.process_exited(client_number)
        # Large frames, and the lists in them, leave holes in the heap below objects that stay.
        if self.router.has_buffered_much:
            self.router.has_buffered_much = False
            trim_heap()


class _LocalSchema(NamedTuple):
    """A request's schema, and whether it fits the model."""

    schema: RequestSchema
    fits_model: bool


class LocalClientRules:
    """The checks of local clients' requests (pure)."""

    def __init__(self, capabilities: Capabilities, signature: Signature, limit_us: int = 0) -> None:
        self._capabilities = capabilities
        self._signature = signature
        self._timeout_limit_us = limit_us
        self._memories: set[tuple[int, Memory]] = set()  # verified regions by client number
        self._schemas: Schemas[_LocalSchema] = Schemas(self._local_schema)

    def process_exited(self, client_number: int) -> None:
        """Remove the state of a local client that has exited."""
        self._memories = {item for item in self._memories if item[0] != client_number}

    def validate(self, client_number: int, submit: Submit, now_ns: int) -> Submit:
        """Return the validated request of a local client, which is received at `now_ns`.

        Raises:
            InvalidArgument: The request is invalid.
            MalformedMessage: The message is not a request.
        """
        size = message_size(submit) + len(submit.request_id)
        if size > MAX_REQUEST_BYTES:
            raise InvalidArgument(
                f"the request has {size} bytes, but at most {MAX_REQUEST_BYTES} are allowed: pass "
                "large tensors in shared memory"
            )
        if submit.correlation_id < 0 or len(submit.correlation_text) > LONGEST_CORRELATION_ID:
            raise InvalidArgument(
                "a sequence's id must be an integer >= 0, or a string of at most "
                f"{LONGEST_CORRELATION_ID} characters"
            )
        if submit.trace and not is_encoded_trace(submit.trace):
            raise InvalidArgument("the request's trace is malformed: see `shmserve guide protocol`")
        self._check_data(client_number, submit)
        arrived_ns = submit.arrived_ns
        if arrived_ns < now_ns - _MAX_TRANSIT_NS:
            arrived_ns = now_ns
        deadline_ns = self._deadline_ns(submit, min(arrived_ns, now_ns))
        server_end_ns = min(arrived_ns, now_ns) + self._timeout_limit_us * 1000
        is_server_limit = self._timeout_limit_us and deadline_ns == server_end_ns
        deadline_origin = "--request-timeout-us" if is_server_limit else ""
        sent_fields = (submit.arrived_ns, submit.deadline_ns, submit.source, submit.deadline_origin)
        if sent_fields == (arrived_ns, deadline_ns, 0, deadline_origin) and not submit.callers:
            return submit
        checked_submit = replace(submit, arrived_ns=arrived_ns, deadline_ns=deadline_ns)
        return replace(checked_submit, source=0, deadline_origin=deadline_origin, callers="")

    def _deadline_ns(self, submit: Submit, arrived_ns: int) -> int:
        """Return the earliest deadline of a request, or 0 if it has none.

        The request's deadline, its timeout and the server's time limit apply.
        """
        if submit.timeout_us <= 0 and not self._timeout_limit_us:
            return max(0, submit.deadline_ns)
        # The end of a timeout must fit an integer of the message format.
        timeout_us = min(submit.timeout_us, MAX_TIMEOUT_US)
        timeouts = (timeout_us, self._timeout_limit_us)
        deadlines_ns = [arrived_ns + timeout * 1000 for timeout in timeouts if timeout > 0]
        if submit.deadline_ns > 0:
            deadlines_ns.append(submit.deadline_ns)
        return min(deadlines_ns, default=0)

    def _check_data(self, client_number: int, submit: Submit) -> None:
        """Check a request's data against its schema, and the schema against the model."""
        data = submit.data
        schema, fits_model = self._schemas[submit.schema]
        if len(data) != schema.data_count:
            raise MalformedMessage(f"expected {schema.data_count} data entries, got {len(data)}")
        for tensor, tensor_data in zip(schema.inputs, data, strict=False):
            if type(tensor_data) is bytes:
                size = len(tensor_data)
            else:
                size = self._check_range(client_number, tensor_data).byte_size
            if size != tensor.byte_size >= 0:
                fits_model = False
        for tensor_data in data[len(schema.inputs) :]:
            self._check_range(client_number, tensor_data)
        if not fits_model:
            inference = schema.inference(data)
            self._signature.check(submit.request_id, inference.inputs, inference.outputs)

    def _local_schema(self, packed_schema: bytes) -> _LocalSchema:
        schema = RequestSchema(packed_schema)
        for name, value in schema.parameters.items():
            if type(value) not in (str, int, bool, float):
                text = f"parameter '{name}' must be a string, an integer, a float or a bool, got "
                raise MalformedMessage(text + type(value).__name__)
        try:
            self._signature.batch_properties(packed_schema)
        except InvalidArgument:
            return _LocalSchema(schema, fits_model=False)
        return _LocalSchema(schema, fits_model=True)

    def _check_range(self, client_number: int, packed_range: Any) -> Range:
        """Return the memory range of a tensor if it is in memory that the client has shared."""
        memory_range = unpack_range(packed_range)
        key = (client_number, memory_range.memory)
        if key not in self._memories:
            if not self._capabilities.owns(*key):
                raise InvalidArgument(
                    "a tensor is in memory that this client has not shared; share it first"
                )
            if len(self._memories) >= _MAX_MEMORIES:
                self._memories.clear()
            self._memories.add(key)
        return memory_range


def _client_number(peer: bytes) -> int:
    """Return the number of a link's local client; only identified clients have links."""
    return int(peer.partition(b".")[0])


class LocalTraces:
    """The traces of local clients' requests to a model version.

    Attributes:
        is_active: Whether traces or slow requests are recorded.
        measured_requests: The requests in flight whose times are recorded, and whether each is
            sampled for a trace, by client and number.
    """

    def __init__(self, model: str, version: str, control: ControlLink) -> None:
        self._model = model
        self._version = version
        self._control = control
        self._sampler = Sampler(TraceSettings())
        self._slow_request_ns = 0
        self.is_active = False
        self.measured_requests: dict[tuple[bytes, int], tuple[Submit, bool]] = {}

    def apply_settings(self, message: SetTracing) -> None:
        """Apply trace settings; settings that have not changed do not restart the sampling."""
        settings = message.settings
        trace_settings = TraceSettings(**settings.get(self._model, settings[""]))
        if trace_settings != self._sampler.settings:
            self._sampler = Sampler(trace_settings)
        self._slow_request_ns = message.slow_request_ms * _NS_PER_MS
        self.is_active = trace_settings.is_on or self._slow_request_ns > 0

    def start_trace(self, peer: bytes, submit: Submit) -> Submit:
        """Return a client's request, with a trace context if its times are recorded."""
        context = TraceContext.of(submit.trace)
        is_sampled = self._sampler.should_trace(context.is_sampled if context.parent_id else None)
        if not is_sampled and not self._slow_request_ns:
            return submit
        if not submit.trace:
            with_tensors = is_sampled and self._sampler.settings.with_tensors
            submit = replace(submit, trace=TraceContext.new(is_sampled, with_tensors).encoded)
        self.measured_requests[peer, submit.id] = submit, is_sampled
        return submit

    def end_trace(self, peer: bytes, message: Any) -> None:
        """End the trace of a request if `message` is the last one about it to its client."""
        if type(message) is Responded:
            if not message.final:
                return
        elif type(message) is not Finished and type(message) is not Failed:
            return
        measured_request = self.measured_requests.pop((peer, message.id), None)
        if measured_request is not None:
            error = "" if type(message) is Finished or not message.code else message.message
            self._report_trace(*measured_request, message.spans, error)

    def _report_trace(self, submit: Submit, is_sampled: bool, spans: bytes, error: str) -> None:
        now_ns = time.monotonic_ns()
        if not (is_sampled or now_ns - submit.arrived_ns > self._slow_request_ns > 0):
            return
        ids = (self._model, self._version, submit.request_id)
        times = (submit.arrived_ns, now_ns)
        self._control.post(RequestTraced(*ids, submit.trace, is_sampled, *times, spans, error))

    def process_exited(self, client_number: int) -> None:
        """Report the requests in `measured_requests` of a local client that has exited."""
        for key in [key for key in self.measured_requests if leading_pid(key[0]) == client_number]:
            self._report_trace(*self.measured_requests.pop(key), b"", "the client has disconnected")
