"""The executor of batches: unpack, run, scatter.

A batch that fails is run again request by request; a batch that is too large for the memory is run
again in halves.

Inputs are read-only views, so a model that writes into them fails. A request that fails with views
is therefore retried once with copies. If the retry succeeds, the model receives copies for later
requests. If several retries fail, the next failures are not retried.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar

from shmserve.errors import Cancelled, Internal, ShmserveError
from shmserve.ipc.messages.inference import RESCHEDULED, BatchFinished, Execute, Reply
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.workers.backends import Backend, ModelContext
from shmserve.workers.batch.backend_request import Request, Response, Unpacker
from shmserve.workers.batch.ragged import Padder
from shmserve.workers.batch.response_stream import OutputStream, ResponseWriter, WarmupStream
from shmserve.workers.context import WrongResponseCount, client_error, is_model_error
from shmserve.workers.links import HandlerTable, WorkerRequest
from shmserve.workers.memory.device_memory import free_cached_memory, is_out_of_memory

logger = logging.getLogger(__name__)

# Maximum input bytes of an execution; a larger batch runs in parts. Many requests may name the same
# memory of a client, so its size does not limit the size of their copies.
MAX_PART_BYTES = 1 << 30

_RETRIES_BEFORE_SKIPS = 16
_SKIPPED_RETRIES = 16  # number of failures without a retry after each further failed retry

_CANCELLED = Cancelled("Request was cancelled")

T = TypeVar("T")
R = TypeVar("R")


class InputPolicy:
    """The decision whether a model receives copies of its inputs, based on its failures."""

    def __init__(self) -> None:
        self.copies_inputs = False  # whether the model receives copies from now on
        self._retry_count = 0
        self._skips_left = 0

    def should_retry(self, request: Request) -> bool:
        """Check whether a failed request should be retried with copies of its inputs."""
        if not any(tensor.is_shared for tensor in request.inputs.values()):
            return False
        if self._skips_left:
            self._skips_left -= 1
            return False
        return True

    def record_retry(self, has_succeeded: bool) -> None:
        """Record whether a retry with copies of the inputs has succeeded."""
        self.copies_inputs = self.copies_inputs or has_succeeded
        self._retry_count += 1
        if self._retry_count >= _RETRIES_BEFORE_SKIPS:
            self._skips_left = _SKIPPED_RETRIES


@dataclass(eq=False)
class Executor:
    """The executor of one model's batches.

    Requests of a decoupled model have streams, and may outlast their batch.
    """

    _context: ModelContext
    _backend: Backend
    _unpacker: Unpacker
    _writer: ResponseWriter
    _is_decoupled: bool
    _padder: Padder | None

    _skips_cancelled: ClassVar[bool] = True  # whether cancelled requests are not executed

    def __post_init__(self) -> None:
        self._link = self._writer.link
        self._pid = os.getpid()
        self._input_policy = InputPolicy()
        self._max_part_bytes = MAX_PART_BYTES

    def handlers(self) -> HandlerTable:
        """Return the handlers of the scheduler's messages, by message type."""
        return {Execute: self.execute}

    def on_scheduler_change(self) -> None:
        """Reset state that belonged to the previous scheduler, after a change of the scheduler."""

    def execute(self, batch: Execute, requests: list[WorkerRequest]) -> BatchFinished:
        """Run one batch.

        The result has a reply to each request, except those that stay open or have ended already.
        """
        start_ns = time.monotonic_ns()
        stopwatch = self._context.stopwatch
        stopwatch.input_end_ns = stopwatch.output_start_ns = 0
        replies: list[Reply] = []
        has_run = False
        remaining_requests = requests
        while remaining_requests:
            open_requests, unpacked_requests, remaining_requests = self._unpack(
                remaining_requests, replies
            )
            if unpacked_requests:
                replies += self._run(open_requests, unpacked_requests)
                has_run = True
        if not self._is_decoupled:  # in a decoupled model, the streams close the requests
            self._link.close_requests(*requests)
        input_end_ns = stopwatch.input_end_ns or start_ns
        output_start_ns = stopwatch.output_start_ns
        # `output_start_ns` is missing if the last execution has failed.
        if output_start_ns < input_end_ns:
            output_start_ns = input_end_ns
        timestamps = (start_ns, input_end_ns, output_start_ns, time.monotonic_ns())
        span_bytes = b""
        if self._context.spans:
            span_bytes = b"".join(self._context.spans)
            self._context.spans.clear()
        copied_bytes = self._context.copy_counter.take()
        return BatchFinished(batch.batch, *timestamps, replies, *copied_bytes, has_run, span_bytes)

    # --- warm-up

    def run_warmup(self, requests: list[Request]) -> list[ShmserveError]:
        """Run warm-up requests in one execution; return the errors of those that failed."""
        if self._is_decoupled:
            streams = [WarmupStream(self._writer, request) for request in requests]
            self._run_streams(list(streams))
            for stream in streams:
                stream.wait()
            return [stream.error for stream in streams if stream.error is not None]
        try:
            responses = self._execute(requests)
            for request, response in zip(requests, responses, strict=True):
                if response.error is None and not response.is_rescheduled:
                    self._writer.scatterer.write(request, response)
            self._writer.scatterer.finish_writes()
        except BaseException as error:  # SystemExit, too: a model must not end its worker
            return [self._client_error(error, requests[0])]
        finally:
            self._context.output_memory.free_unsent()
            self._context.copy_counter.take()
        return [response.error for response in responses if response.error is not None]

    # --- batches

    def _unpack(
        self, requests: list[WorkerRequest], replies: list[Reply], copy_inputs: bool = False
    ) -> tuple[list[WorkerRequest], list[Request], list[WorkerRequest]]:
        """Unpack the next requests of a batch, up to `MAX_PART_BYTES`.

        Args:
            requests: The requests that have not run yet.
            replies: Receives the replies to requests that cannot run.
            copy_inputs: Whether the model receives copies of all inputs.

        Returns:
            The requests of the part, the same requests unpacked, and the requests after the part.
        """
        part_requests: list[WorkerRequest] = []
        unpacked_requests: list[Request] = []
        byte_size = 0
        copy_inputs = copy_inputs or self._input_policy.copies_inputs
        with self._link.lock:
            for index, open_request in enumerate(requests):
                failure: ShmserveError = _CANCELLED
                if not (open_request.cancelled and self._skips_cancelled):
                    try:
                        is_cancelled = partial(self._link.is_cancelled, open_request)
                        request = self._unpacker.request(open_request.work, is_cancelled)
                        byte_size += request.byte_size
                        if byte_size > self._max_part_bytes and part_requests:
                            return part_requests, unpacked_requests, requests[index:]
                        if copy_inputs:
                            for tensor in request.inputs.values():
                                self._context.copy_counter.inputs += tensor.detach()
                        if open_request.work.trace and not self._is_decoupled:
                            self._writer.scatterer.trace(request, request.inputs.values())
                        part_requests.append(open_request)
                        unpacked_requests.append(request)
                        continue
                    except ShmserveError as error:
                        failure = error
                    except MalformedMessage as error:
                        logger.error(
                            "model '%s': a request is malformed and fails: %s",
                            self._context.model_name,
                            error,
                        )
                        failure = Internal()
                    except Exception as error:  # memory is exhausted, or a device fails
                        failure = client_error(self._context, error)
                replies.append(self._close_with_error(open_request, failure))
        return part_requests, unpacked_requests, []

    def _close_with_error(self, open_request: WorkerRequest, error: ShmserveError) -> Reply:
        self._link.close_requests(open_request)
        return Reply(open_request.key, error.code, error.message)

    def _call_backend(self, execute: Callable[[list[T]], R], items: list[T]) -> R:
        """Call the backend, and record the timestamps that the backend has not recorded."""
        start_ns = time.monotonic_ns()
        try:
            result = execute(items)
        finally:
            if os.getpid() != self._pid:
                os._exit(1)  # this process is a child that the model has forked
        stopwatch = self._context.stopwatch
        stopwatch.input_end_ns = stopwatch.input_end_ns or start_ns
        stopwatch.output_start_ns = stopwatch.output_start_ns or time.monotonic_ns()
        return result

    # --- decoupled

    def _run_streams(self, streams: list[OutputStream]) -> list[Reply]:
        # A failed batch is not run again, because the model may have begun to respond.
        try:
            self._call_backend(self._backend.execute_decoupled, streams)
        except BaseException as error:  # SystemExit, too: a model must not end its worker
            client_failure = streams[0].client_error(error)
            replies = [stream.refuse(client_failure) for stream in streams]
            return [reply for reply in replies if reply is not None]
        rescheduled_keys = [stream.request.work.key for stream in streams if stream.is_rescheduled]
        return [Reply(key, RESCHEDULED, "") for key in rescheduled_keys]

    # --- one response for each request

    def _run(self, open_requests: list[WorkerRequest], requests: list[Request]) -> list[Reply]:
        """Execute requests together, and write their outputs.

        A batch that fails is run again, request by request, so that only requests that the model
        cannot execute fail. A single request that fails with views of shared memory is run again
        with copies. A batch that is too large for the memory is run again in halves.
        """
        if self._is_decoupled:
            pairs = zip(open_requests, requests, strict=True)
            return self._run_streams([OutputStream(self._writer, *pair) for pair in pairs])
        replies: list[Reply] = []
        failed_requests: list[WorkerRequest] = []
        is_too_large = False
        try:
            responses = self._execute(requests)
        except BaseException as error:  # SystemExit, too: a model must not end its worker
            is_too_large = len(requests) > 1 and is_out_of_memory(error)
            if is_too_large:
                logger.warning(
                    "model '%s': a batch of %d requests exceeds the memory (%r) and is split",
                    self._context.model_name,
                    len(requests),
                    error,
                )
            elif len(requests) > 1:
                logger.warning(
                    "model '%s': a batch failed (%r); its requests are executed one by one",
                    self._context.model_name,
                    error,
                )
            elif not (is_model_error(error) and self._should_retry(requests[0])):
                # Not stored in a variable: the error's traceback refers to this frame, and the
                # reference cycle would keep the inputs alive.
                return [
                    self._close_with_error(open_requests[0], self._client_error(error, requests[0]))
                ]
            failed_requests = open_requests
        else:
            with self._link.lock:
                self._link.pump()
                triples = zip(open_requests, requests, responses, strict=True)
                for open_request, request, response in triples:
                    reply = self._scatter(open_request, request, response)
                    if reply is None:
                        failed_requests.append(open_request)
                    else:
                        replies.append(reply)
                self._writer.scatterer.finish_writes()
        if failed_requests:
            self._link.pump()
            if is_too_large:
                free_cached_memory()  # the error no longer refers to the tensors
            group_size = (len(failed_requests) + 1) // 2 if is_too_large else 1
            for start in range(0, len(failed_requests), group_size):
                group = failed_requests[start : start + group_size]
                replies += self._run_again(group, copy_inputs=len(requests) == 1)
        return replies

    def _run_again(self, failed_requests: list[WorkerRequest], copy_inputs: bool) -> list[Reply]:
        replies: list[Reply] = []
        # Unpacked again, because the model may have written into its inputs.
        open_requests, requests, _ = self._unpack(failed_requests, replies, copy_inputs)
        if requests:
            replies += self._run(open_requests, requests)
            if copy_inputs:
                self._input_policy.record_retry(has_succeeded=not replies[0].code)
                if self._input_policy.copies_inputs:
                    self._context.warn_of_writes()
        return replies

    def _should_retry(self, request: Request) -> bool:
        return self._backend.read_only_inputs and self._input_policy.should_retry(request)

    def _client_error(self, error: BaseException, request: Request) -> ShmserveError:
        return client_error(self._context, error, request.work)

    def _execute(self, requests: list[Request]) -> list[Response]:
        padded_inputs = None if self._padder is None else self._padder.pad(requests)
        responses = self._call_backend(self._backend.execute, requests)
        if type(responses) is not list or len(responses) != len(requests):
            raise WrongResponseCount(len(requests), responses)
        if self._padder is not None and padded_inputs is not None:
            self._padder.cut(responses, padded_inputs)
        return responses

    def _scatter(
        self, open_request: WorkerRequest, request: Request, response: Response
    ) -> Reply | None:
        """Return the reply to a request, or None if the request is to run again."""
        if open_request.cancelled:
            return self._close_with_error(open_request, _CANCELLED)
        if response.error is not None:
            if self._should_retry(request):
                return None
            return self._close_with_error(open_request, response.error)
        try:
            packed_response = self._writer.scatterer.write(request, response)
        except BaseException as error:
            return self._close_with_error(open_request, self._client_error(error, request))
        return Reply(open_request.key, "", "", *packed_response)
