"""The loop of a loaded instance: wait, execute, report.

Only the loss of the device ends the loop by an exception; the process must be restarted then.

Before it is ready, an instance runs the warm-up requests of `model_warmup`. A sample of batch size
N is N requests of batch size 1 in one execution, repeated `count` times. These requests bypass the
scheduler and statistics, and their responses are dropped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc.messages.inference import ReaderExited, ReleaseOutputs, Work
from shmserve.ipc.messages.publications import MemoryDropped, ProcessExited
from shmserve.ipc.messages.supervision import Attach, CheckMemory, CheckReady, ReadyChecked, Stop
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.processes import SPIN_NS, BusyPoll
from shmserve.ipc.tensors.inference import Inference, pack_inference
from shmserve.ipc.tensors.samples import Sample, warmup_samples
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.backends import Backend
from shmserve.workers.batch.execute import Executor
from shmserve.workers.batch.ragged import Padder
from shmserve.workers.batch.request import Input, Request, Unpacker
from shmserve.workers.batch.response_stream import MetricsReports, ResponseWriter
from shmserve.workers.batch.scatter import Scatterer
from shmserve.workers.context import ModelContext
from shmserve.workers.links.processes import InstanceLink, WorkerRequest
from shmserve.workers.sequences import SequenceExecutor

logger = logging.getLogger(__name__)


def _warmup_requests(sample: Sample, signature: Signature, unpacker: Unpacker) -> Iterator[Request]:
    """Yield the requests of a warm-up sample.

    Raises:
        InvalidArgument: The sample does not fit the model.
    """
    client_tensors = [tensor for tensor in sample.tensors if tensor.name in signature.inputs]
    # Clients do not send the control inputs of sequences: here the sample has their values.
    controls = [tensor for tensor in sample.tensors if tensor.name not in signature.inputs]
    signature.check("", client_tensors, ())
    schema, data = pack_inference(Inference(tuple(client_tensors)))
    for key in range(1, sample.batch_size + 1):
        request = unpacker.request(Work(key, 0, schema, data))
        for tensor in controls:
            assert isinstance(tensor.data, bytes)
            raw = memoryview(bytearray(tensor.data))
            request.inputs[tensor.name] = Input(tensor.name, tensor.datatype, tensor.shape, raw)
        yield request


class WorkerInstance:
    """A loaded model, and the link to its scheduler."""

    def __init__(self, context: ModelContext, backend: Backend, config: ModelSpec) -> None:
        self._context = context
        self._backend = backend
        self._output_memory = context.output_memory
        self._handlers: dict[type[Any], Callable[[Any, list[WorkerRequest]], Any]] = {}
        link_arguments = (context.control, context.index, os.getpid(), self._handle_released)
        self.link = InstanceLink(*link_arguments, loop_messages=self._handlers.keys())
        self._metrics = MetricsReports(backend.metrics, self.link)
        backend.report_metrics_by(self._metrics.report_change)
        signature = Signature(config, context.version)
        mappings, counter = context.mappings, context.copy_counter
        unpacker = Unpacker(signature, mappings, counter, backend.device_inputs)
        strictness = (backend.strict_outputs, backend.strict_shapes)
        expects_all = not config.decoupled and not config.may_omit_outputs
        scatterer = Scatterer(signature, context, *strictness, expects_all)
        self._writer = ResponseWriter(self.link, scatterer, self._metrics, context)
        padding = signature.padding
        padder = None if padding is None else Padder(padding, signature, context.copy_counter)
        executor_args = (context, backend, unpacker, self._writer, config.decoupled, padder)
        self._executor = (
            SequenceExecutor(*executor_args, config)
            if config.sequence_batching is not None
            else Executor(*executor_args)
        )
        self._samples = warmup_samples(config, context.model_dir)
        self._signature, self._unpacker = signature, unpacker
        handlers = backend.serve(self._writer, unpacker) or self._executor.handlers()
        self._handlers.update(handlers)
        self._in_flight = 1  # requests in flight in all instances when the last batch was sent
        self._busy_poll = BusyPoll()

    def warm_up(self) -> None:
        """Run all warm-up samples in order.

        Raises:
            InvalidArgument: A request has failed; the text is Triton's.
        """
        context = self._context
        text = f"model '{context.model_name}' instance {context.instance_name}"
        for sample in self._samples:
            name = sample.name
            for n in range(1, sample.count + 1):
                logger.debug("%s is running warmup sample '%s' for iteration %d", text, name, n)
                try:
                    requests = list(_warmup_requests(sample, self._signature, self._unpacker))
                    errors = self._executor.run_warmup(requests)
                except ShmserveError as error:
                    errors = [error]
                if errors:
                    logger.debug("%s failed to run warmup sample '%s'", text, name)
                    failure = f"failed to run warmup sample '{name}'"
                    texts = [f"{failure}: {error.message}; " for error in errors]
                    raise InvalidArgument("".join(texts))

    def run(self, endpoint: str) -> None:
        """Connect the instance to the scheduler at `endpoint`, and serve until `Stop`."""
        self.attach(endpoint)
        control = self._context.control
        timeout_s: float | None = None
        while True:
            self.link.loop_reads = True
            if self._wait(timeout_s):
                self.link.receive()
            self.link.loop_stops_reading()
            while control.inbox:
                message = control.inbox.popleft()
                if isinstance(message, Stop):
                    return
                self._handle(message)
            if self._writer.abandoned:
                self._writer.end_abandoned()
            if not self.link.commands:
                timeout_s = self._metrics.send_if_due()
            self.serve_commands()

    def serve_commands(self) -> None:
        """Execute the commands received from the scheduler."""
        while self.link.commands:
            message, requests = self.link.commands.popleft()
            self._in_flight = getattr(message, "in_flight", self._in_flight)
            reply = self._handlers[type(message)](message, requests)
            if reply is not None:
                self.send_reply(reply)

    def _handle(self, message: Any) -> None:
        """Handle a message of the supervisor."""
        context = self._context
        match message:
            case Attach(endpoint=successor):
                # An instance that was loaded while its scheduler was replaced is connected already.
                if not self.link.is_at(successor):
                    self.attach(successor)
            case CheckMemory():
                if context.device_memory is not None:
                    context.control.send(context.device_memory.check(message))
            case CheckReady(id=number):
                # In a thread, because the check may take long and batches continue.
                threading.Thread(target=self._check_ready, args=(number,), daemon=True).start()
            case MemoryDropped(memory_id=memory_id):
                with self.link.lock:
                    context.mappings.unmap(memory_id)
            case ProcessExited(process=pid):
                with self.link.lock:
                    context.mappings.unmap_process(pid)
                    self._output_memory.record_exit(pid)
                    if not self.link.connected:
                        self._output_memory.drop_exited()
            case BaseException():
                raise message  # a thread of the model has detected the loss of the device
            case _:
                logger.warning("unexpected %s from the supervisor", type(message).__name__)

    def _handle_released(self, message: ReleaseOutputs | ReaderExited) -> None:
        match message:
            case ReleaseOutputs(client_pid=pid, offsets=offsets, memory=memory):
                # The message may concern a predecessor with the same pid.
                if memory == self._output_memory.id:
                    self._output_memory.release(pid, offsets)
            case ReaderExited(pid=pid):
                self._output_memory.drop_reader(pid)

    def _check_ready(self, check_number: int) -> None:
        is_ready = False
        try:
            is_ready = self._backend.is_ready()
        except BaseException:  # SystemExit, too: a model must not end its worker
            logger.exception("model '%s' failed in `is_ready`", self._context.model_name)
        self._context.control.send(ReadyChecked(check_number, is_ready))

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait as `SupervisorLink.wait` does, after polling for a while if polling is faster.

        Returns:
            Whether a watched descriptor is readable or another thread has woken the loop.
        """
        control, in_flight = self._context.control, self._in_flight
        start_ns = time.monotonic_ns()
        is_readable = False
        # Polling would keep the GIL from the threads of the model.
        if not self.link.has_open_requests and self._busy_poll.should_spin[in_flight > 0]:
            poll_end_ns = start_ns + SPIN_NS
            while not is_readable and not control.inbox and time.monotonic_ns() < poll_end_ns:
                os.sched_yield()
                is_readable = control.wait(0.0)
        if not is_readable and not control.inbox:
            is_readable = control.wait(timeout_s)
        self._busy_poll.observe(in_flight, time.monotonic_ns() - start_ns)
        return is_readable

    def attach(self, endpoint: str) -> None:
        """Connect the instance to the scheduler at `endpoint` instead of the current one."""
        self.link.attach(endpoint)
        with self.link.lock:
            self._output_memory.drop_exited()
        self._executor.on_scheduler_change()
        self._metrics.attach()
        self.link.flush()

    def send_reply(self, reply: Any) -> None:
        """Send a reply to the scheduler; release its output memory if it cannot be sent."""
        with self.link.lock:
            self._metrics.post_changes()
            if not self.link.send(reply):
                self._output_memory.free_unsent()
            elif self._output_memory.unsent:
                self._output_memory.mark_sent()
