"""A loaded instance's loop: wait, unpack, execute, scatter, report.

No exception ends it but the loss of its device: after that a process can only start again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Any

from shmserve.errors import Cancelled, Internal, ShmserveError, Unavailable
from shmserve.ipc.messages import (
    Attach,
    BatchFinished,
    CancelExecution,
    CheckMemory,
    Execute,
    InstanceReady,
    MemoryDropped,
    ProcessExited,
    ReleaseOutputs,
    Reply,
    Stop,
)
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport.busy_poll import SPIN_NS, BusyPoll
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.workers.backends import Answer, Backend, ModelContext, Request
from shmserve.workers.batch.scatter import Scatterer
from shmserve.workers.batch.unpack import Unpacker
from shmserve.workers.memory.outputs import OutputMemory
from shmserve.workers.metrics import MetricsReports
from shmserve.workers.user_code import in_words

logger = logging.getLogger(__name__)

# Input bytes; a batch of more runs in parts. Many requests may name the same memory of a client's:
# what is copied for them, or gathered, is no longer bounded by what that client has.
LARGEST_PART = 1 << 30


class Instance:
    """One loaded model and its link to the scheduler that feeds it."""

    def __init__(
        self,
        context: ModelContext,
        backend: Backend,
        config: dict[str, Any],
        index: int,
        pid: int,
    ) -> None:
        self._context = context
        self._backend = backend
        self._index = index
        self._pid = pid
        self._memory = OutputMemory(context.arena)
        self._metrics = MetricsReports(backend.metrics)
        signature = Signature(config, context.version)
        self._copied = context.copied
        self._unpacker = Unpacker(
            signature, context.mappings, self._is_cancelled, self._copied, backend.device_inputs
        )
        self._scatterer = Scatterer(
            signature,
            context.mappings,
            self._memory,
            backend.strict_outputs,
            context.device_memory,
            self._copied,
            context.threads,
        )
        self._batches: deque[Execute] = deque()
        self._live = 1  # requests under way as the last batch was sent, in all instances
        self._busy_poll = BusyPoll()
        self._cancelled: set[int] = set()
        self._work: dict[int, tuple[int, bytes]] = {}  # what each request of the batch came as
        self._scheduler: Dealer | None = None
        self._thread = threading.get_ident()
        # Set for good once the model has failed because it writes into its inputs.
        self._copy_inputs = False

    def run(self, endpoint: str) -> None:
        """Offer the instance at `endpoint` and serve until told to stop."""
        scheduler = self.attach(endpoint)
        control = self._context.control
        timeout_s: float | None = None
        while True:
            if self._wait(timeout_s):
                self._receive()
            while control.inbox:
                match control.inbox.popleft():
                    case Stop():
                        return
                    case Attach(endpoint=successor):
                        scheduler = self.attach(successor)
                    case CheckMemory() as question:
                        if self._context.device_memory is not None:
                            control.send(self._context.device_memory.check(question))
                    case MemoryDropped(memory_id=memory_id):
                        self._context.mappings.drop(memory_id)
                    case ProcessExited(pid=pid):
                        self._context.mappings.drop_process(pid)
                        self._memory.drop_reader(pid)
                    case message:
                        logger.warning("unexpected %s", type(message).__name__)
            while self._batches:
                batch = self._batches.popleft()
                self._live = batch.live
                self.hand_over(scheduler, self.finish(batch))
            timeout_s = self._metrics.between_batches(scheduler)

    def _wait(self, timeout_s: float | None) -> bool:
        """As `Control.wait`, awake for a moment where that is worth it."""
        control, live = self._context.control, self._live
        began_ns = time.monotonic_ns()
        others = False
        if self._busy_poll.worth(live):
            until_ns = began_ns + SPIN_NS
            while not others and not control.inbox and time.monotonic_ns() < until_ns:
                os.sched_yield()
                others = control.wait(0.0)
        if not others and not control.inbox:
            others = control.wait(timeout_s)
        self._busy_poll.observe(live, time.monotonic_ns() - began_ns)
        return others

    # --- links

    def attach(self, endpoint: str) -> Dealer:
        """Offer the instance to the scheduler at `endpoint`, and to no other any more."""
        control = self._context.control
        if self._scheduler is not None:
            control.unwatch(self._scheduler.fd)
            self._scheduler.close()
            self._batches.clear()
            self._cancelled.clear()
        self._scheduler = Dealer(endpoint, f"{self._index}.{self._pid}")
        control.watch(self._scheduler.fd)
        self._scheduler.post(InstanceReady(self._index, self._pid))
        self._metrics.attach(self._scheduler)
        self._scheduler.flush()
        return self._scheduler

    def _receive(self) -> None:
        """Take all that the scheduler has sent; batches wait in `_batches`."""
        assert self._scheduler is not None
        for message in self._scheduler.receive():
            match message:
                case Execute():
                    self._batches.append(message)
                case CancelExecution(key=key):
                    # One that has ended is forgotten: another scheduler gives its key again.
                    if self._has(key):
                        self._cancelled.add(key)
                case ReleaseOutputs(client_pid=pid, offsets=offsets):
                    self._memory.release(pid, offsets)
                case _:
                    logger.warning("unexpected %s", type(message).__name__)
        if not self._scheduler.connected:
            self._batches.clear()  # nobody would hear of them

    def _has(self, key: int) -> bool:
        waiting = (request.key for batch in self._batches for request in batch.requests)
        return key in self._work or key in waiting

    def _look(self) -> None:
        """Take what has come meanwhile; most often that is nothing, which `wait` finds sooner."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        while scheduler.wait(0):
            self._receive()
        if not scheduler.connected:
            # What it had given us is run again elsewhere, or refused: its clients' memory may be in
            # use for something else by the time that we would write to it.
            self._cancelled.update(self._work)

    def _is_cancelled(self, key: int) -> bool:
        # A model may ask from a thread of its own; the socket belongs to this one.
        if threading.get_ident() == self._thread:
            self._look()
        return key in self._cancelled

    # --- a batch

    def hand_over(self, scheduler: Dealer, finished: BatchFinished) -> None:
        """Return a batch; what was made for it is nobody's where that does not arrive."""
        self._metrics.before_answers(scheduler)
        if scheduler.send(finished):
            self._memory.delivered()
        else:
            self._memory.undelivered()

    def finish(self, batch: Execute) -> BatchFinished:
        """Run one batch and say how each of its requests ended."""
        start_ns = time.monotonic_ns()
        watch = self._context.stopwatch
        watch.input_end_ns = watch.output_start_ns = 0
        replies: list[Reply] = []
        requests: list[Request] = []
        byte_size = 0
        ran = False
        self._work = {each.key: (each.client_pid, each.work) for each in batch.requests}
        for key in self._work:
            unpacked = _CANCELLED if key in self._cancelled else self._unpack(key)
            if not isinstance(unpacked, Request):
                replies.append(_failed(key, unpacked))
                continue
            byte_size += unpacked.byte_size
            if byte_size > LARGEST_PART and requests:
                replies += self._run(requests)
                requests, byte_size = [], unpacked.byte_size
            requests.append(unpacked)
            ran = True
        if requests:
            replies += self._run(requests)
        self._cancelled.difference_update(self._work)
        self._work.clear()
        end_ns = time.monotonic_ns()
        input_end_ns = min(max(watch.input_end_ns, start_ns), end_ns)
        output_start_ns = min(max(watch.output_start_ns, input_end_ns), end_ns)
        times = (start_ns, input_end_ns, output_start_ns, end_ns)
        return BatchFinished(batch.batch, *times, replies, *self._copied.take(), ran)

    def _unpack(self, key: int) -> Request | ShmserveError:
        client_pid, work = self._work[key]
        try:
            request = self._unpacker.request(key, client_pid, work)
            if self._copy_inputs:
                for item in request.inputs.values():
                    self._copied.inputs += item.detach()
        except ShmserveError as error:
            return error
        except MalformedMessage as error:
            logger.error("a request cannot be read: %s", error)
            return Internal("internal error")
        except Exception as error:  # no memory for a copy of an input, a device that fails
            return self._explain(error)
        return request

    def _run(self, requests: list[Request]) -> list[Reply]:
        """Execute and scatter; a batch that fails as a whole is run again one by one.

        So a request that the model cannot take fails alone, and its neighbours are answered.
        """
        error: BaseException
        try:
            answers = self._execute(requests)
        except BaseException as raised:  # SystemExit too: a model does not end its worker so
            error = raised
        else:
            self._look()
            replies = [self._scatter(*pair) for pair in zip(requests, answers, strict=True)]
            self._scatterer.settle()
            return replies
        if _wrote_into_inputs(error, requests):
            logger.warning(
                "model '%s' writes into its inputs, so each is copied for it",
                self._context.model_name,
            )
            self._copy_inputs = True
        elif len(requests) == 1:
            return [_failed(requests[0].key, self._explain(error, requests[0]))]
        else:
            logger.warning("a batch failed (%r) and is run again one by one", error)
        self._look()
        return [self._run_alone(request.key) for request in requests]

    def _run_alone(self, key: int) -> Reply:
        if key in self._cancelled:
            return _failed(key, _CANCELLED)
        # From the message once more: the model may have written into what it was given.
        request = self._unpack(key)
        if not isinstance(request, Request):
            return _failed(key, request)
        return self._run([request])[0]

    def _execute(self, requests: list[Request]) -> list[Answer]:
        watch = self._context.stopwatch
        before_ns = time.monotonic_ns()
        try:
            answers = self._backend.execute(requests)
        finally:
            if os.getpid() != self._pid:
                os._exit(1)  # the model has forked, and this is not the process that was asked
        if type(answers) is not list or len(answers) != len(requests):
            size = len(answers) if isinstance(answers, list) else 0
            raise _Mismatch(
                "Number of InferenceResponse objects do not match the number of InferenceRequest "
                f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) "
                f"size is:{size}"
            )
        watch.input_end_ns = watch.input_end_ns or before_ns
        watch.output_start_ns = watch.output_start_ns or time.monotonic_ns()
        return answers

    def _scatter(self, request: Request, answer: Answer) -> Reply:
        if request.key in self._cancelled:
            return _failed(request.key, _CANCELLED)
        if answer.error is not None:
            return _failed(request.key, answer.error)
        try:
            return Reply(request.key, "", "", self._scatterer.write(request, answer))
        except BaseException as error:
            return _failed(request.key, self._explain(error, request))

    def _explain(self, error: BaseException, request: Request | None = None) -> ShmserveError:
        """What a client is told of what a model, reading its inputs or writing its outputs raised.

        A `request` that could not be read is not known.
        """
        if isinstance(error, ShmserveError):
            return error
        where = self._context.instance_name
        if isinstance(error, _Mismatch):
            return Internal(
                f"Failed to process the request(s) for model '{where}', message: {error}"
            )
        logger.error(
            "model '%s' failed",
            self._context.model_name,
            exc_info=error,
            extra={"request_id": request.inference.request_id} if request else None,
        )
        if _device_lost(error):
            raise error  # the process ends, another one starts, and what was in it runs there
        if _out_of_memory(error):
            _free_device_memory()
            return Unavailable(
                f"there is not enough memory on device '{self._context.device}' for model "
                f"'{self._context.model_name}' to run this request"
            )
        return Internal(
            f"Failed to process the request(s) for model '{where}', message: {in_words(error)}"
        )


class _Mismatch(Exception):
    """A backend returned something else than one answer a request."""


_CANCELLED = Cancelled("Request was cancelled")


def _failed(key: int, error: ShmserveError) -> Reply:
    return Reply(key, error.code, error.message, b"")


def _wrote_into_inputs(error: BaseException, requests: list[Request]) -> bool:
    # numpy and what builds on it say so in these words, each in its own sentence.
    text = in_words(error)
    return ("read-only" in text or "readonly" in text) and any(
        item.shared for request in requests for item in request.inputs.values()
    )


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    from shmserve.workers import device

    return device.out_of_memory(error)


def _device_lost(error: BaseException) -> bool:
    from shmserve.workers import device

    return device.lost(error)


def _free_device_memory() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
