"""A worker process, from its start to its end: it loads one instance of one model and serves it.

WorkerStarted -> [CompleteConfig -> ConfigCompleted] -> LoadInstance -> InstanceLoaded,
InstanceReady -> batches -> Stop
                          └─ LoadFailed                     └─ LoadFailed, and the process ends
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from shmserve import logs
from shmserve.errors import Internal, InvalidArgument, ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import ReaderExited, ReleaseOutputs, Work
from shmserve.ipc.messages.publications import MemoryDropped, ProcessExited
from shmserve.ipc.messages.supervision import (
    Attach,
    CheckMemory,
    CheckReady,
    CompleteConfig,
    ConfigCompleted,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    ReadyChecked,
    Stop,
    WorkerStart,
    WorkerStarted,
    decode_start,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.processes import (
    SPIN_NS,
    BusyPoll,
    keep_freed_blocks,
    raise_oom_score,
    set_process_title,
    trim_heap,
)
from shmserve.ipc.tensors.samples import Sample, warmup_samples
from shmserve.ipc.tensors.schemas import Inference, pack_inference
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport.zmtp import ENDPOINT_PREFIX, Dealer
from shmserve.workers import backends, environment
from shmserve.workers.backends import Backend
from shmserve.workers.backends.python import log_thread_exception
from shmserve.workers.batch.backend_request import Input, Request, Unpacker
from shmserve.workers.batch.execute import Executor
from shmserve.workers.batch.ragged import Padder
from shmserve.workers.batch.response_stream import MetricsReports, ResponseWriter
from shmserve.workers.batch.scatter import Scatterer
from shmserve.workers.context import ModelContext
from shmserve.workers.links import InstanceLink, SupervisorLink, WorkerRequest
from shmserve.workers.memory.device_memory import DeviceMemory
from shmserve.workers.memory.outputs import OutputMemory
from shmserve.workers.memory.workspace import Workspace
from shmserve.workers.sequences import SequenceExecutor, read_states
from shmserve.workers.user_code import (
    describe_error,
    model_traceback,
    source_location,
    traceback_line,
)

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_TRIM_DELAY_S = 0.5  # the pause after which freed memory is returned to the system
# A worker has the most memory, and its death affects only the requests that it executes.
OOM_SCORE_ADJ = 400


def resume(fd: int) -> None:
    """Run a worker in the interpreter of its environment; the file `fd` has the start record."""
    with open(fd, "rb") as file:
        file.seek(0)
        run(file.read())


def run(start_record: bytes) -> None:
    """Run a worker until its process should exit; `start_record` is an encoded `WorkerStart`."""
    start = decode_start(WorkerStart, start_record)
    model, index = start.model_name, start.index
    logs.configure(f"worker {model}.{index}", start.log)
    environment_error: ShmserveError | None = None
    if start.environment:
        try:
            environment.enter(start)
        except ShmserveError as error:
            environment_error = error
    stacks_fd = _set_signals()  # SIGUSR2 writes stacks to it
    threading.excepthook = log_thread_exception
    device = _torch_device_name(start.device)
    set_process_title(f"worker {model}.{index} {device}")
    raise_oom_score(OOM_SCORE_ADJ)
    _limit_threads(start.threads)
    keep_freed_blocks()
    # A model that parses its command line finds no arguments, as in Triton.
    sys.argv[:] = [""]
    pid = os.getpid()
    identity = f"worker.{start.number}.{index}.{pid}"
    control = SupervisorLink(Dealer(endpoints.control(start.run_dir), identity))
    try:
        control.send(WorkerStarted(pid, stacks_fd))
        _Worker(_create_context(start, device, control), environment_error).run()
    finally:
        # The last messages, such as the reason of a failed load, should still arrive.
        control.close(_CLOSE_TIMEOUT_S)


@dataclass(eq=False)
class _Worker:
    """The lifecycle of a worker before its instance serves.

    `_environment_error` is the reason why the worker cannot load the model, if there is one.
    """

    _context: ModelContext
    _environment_error: ShmserveError | None = None
    _backend: Backend | None = None
    _instance: WorkerInstance | None = None

    @property
    def _control(self) -> SupervisorLink:
        return self._context.control

    def run(self) -> None:
        """Run until `Stop`, or until a failure that was reported to the supervisor."""
        while True:
            self._control.wait()
            while self._control.inbox:
                match self._control.inbox.popleft():
                    case Stop():
                        self._unload()
                        return
                    case CompleteConfig(config=config):
                        if not self._run_or_report(partial(self._complete_config, config)):
                            return
                    case LoadInstance(config=config, endpoint=endpoint):
                        if self._run_or_report(partial(self._load, config)):
                            self._serve(endpoint)
                        return
                    case Attach() | MemoryDropped() | ProcessExited():
                        pass  # nothing is attached or mapped yet
                    case message:
                        logger.warning("unexpected message before load: %s", type(message).__name__)

    def _complete_config(self, config: ModelSpec) -> ConfigCompleted:
        return ConfigCompleted(self._make_backend(config).complete_config(config.source))

    def _load(self, config: ModelSpec) -> InstanceLoaded:
        backend = self._make_backend(config)
        if config.sequence_batching is not None:
            # Called before the model is loaded: this raises if a data file cannot be read.
            read_states(config, self._context.model_dir)
        # One instance of each group logs warnings about the model.
        is_first_of_group = self._context.instance_name.endswith("_0")
        with contextlib.nullcontext() if is_first_of_group else logs.without_warnings():
            backend.load(config)
            logs.enable()
            self._instance = WorkerInstance(self._context, backend, config)
            self._instance.warm_up()
        self._check_access()
        # The current objects are permanent. Scanning them would also copy the pages that this
        # process shares with its zygote.
        gc.collect()
        gc.freeze()
        return InstanceLoaded(backend.checks_ready, _device_byte_size())

    def _check_access(self) -> None:
        """Check that the model's code has not removed this process's access to the server.

        Raises:
            Internal: The sockets, or the memory of other processes, are inaccessible.
        """
        try:
            os.stat(endpoints.control(self._context.run_dir).removeprefix(ENDPOINT_PREFIX))
            # The kernel requires the same permission as for opening a tensor's memory.
            os.readlink(f"/proc/{os.getppid()}/exe")
        except OSError as error:
            raise Internal(
                f"the worker cannot access the server's sockets and memory ({error.strerror}): a "
                "model must not change its process's user, group, capabilities or root folder"
            ) from None

    def _make_backend(self, config: ModelSpec) -> Backend:
        if self._environment_error is not None:
            raise self._environment_error
        if self._backend is None:
            self._backend = backends.find(config)(self._context)
        return self._backend

    def _serve(self, endpoint: str) -> None:
        assert self._instance is not None
        try:
            self._instance.run(endpoint)
        finally:
            self._unload()

    def _unload(self) -> None:
        if self._backend is not None:
            try:
                self._backend.unload()
            except BaseException:  # the process ends even if unloading fails
                logger.exception(
                    "model '%s' failed to finalize; its worker exits all the same",
                    self._context.model_name,
                )

    def _run_or_report(self, load_step: Callable[[], ConfigCompleted | InstanceLoaded]) -> bool:
        pid = os.getpid()
        try:
            report = load_step()
            if os.getpid() != pid:
                sys.exit(0)
            self._control.send(report)
        except ShmserveError as error:
            context = self._context
            frames = traceback_line(error.message, context.model_name, context.version_dir)
            self._control.send(LoadFailed(error.code, error.message, frames))
        except BaseException as error:  # SystemExit, too: a model must not end its worker
            if os.getpid() != pid:  # a child that the model's code forked shares the links
                os._exit(1 if getattr(error, "code", 1) else 0)
            # The supervisor logs the failure, once for all instances.
            logger.debug("model '%s' failed to load", self._context.model_name, exc_info=True)
            folder = self._context.version_dir
            error_text = describe_error(error) + source_location(error, folder)
            self._control.send(LoadFailed("INTERNAL", error_text, model_traceback(error, folder)))
        else:
            return True
        return False


class WorkerInstance:
    """A loaded model, and the link to its scheduler.

    `run` raises an exception only if the device is lost. The process must then be restarted.
    """

    def __init__(self, context: ModelContext, backend: Backend, config: ModelSpec) -> None:
        self._context = context
        self._backend = backend
        self._output_memory = context.output_memory
        self._handlers: dict[type[Any], Callable[[Any, list[WorkerRequest]], Any]] = {}
        link_arguments = (context.control, context.index, os.getpid(), self._handle_released)
        # The handlers need the link, so they are added below; the view of the keys includes them.
        self.link = InstanceLink(*link_arguments, loop_messages=self._handlers.keys())
        self._metrics = MetricsReports(backend.metrics, self.link)
        backend.report_metrics_by(self._metrics.report_change)
        signature = Signature(config, context.version)
        mappings, counter = context.mappings, context.copy_counter
        unpacker = Unpacker(signature, mappings, counter, backend.device_inputs)
        strict_flags = (backend.strict_outputs, backend.strict_shapes)
        expects_all = not config.decoupled and not config.may_omit_outputs
        scatterer = Scatterer(signature, context, *strict_flags, expects_all)
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

        A sample of batch size N is N requests of batch size 1 in one execution, repeated `count`
        times. These requests bypass the scheduler and statistics, and their responses are dropped.

        Raises:
            InvalidArgument: A request has failed. The message has Triton's words.
        """
        context = self._context
        subject = f"model '{context.model_name}' instance {context.instance_name}"
        for sample in self._samples:
            name = sample.name
            for n in range(1, sample.count + 1):
                logger.debug("%s is running warmup sample '%s' for iteration %d", subject, name, n)
                try:
                    requests = list(_warmup_requests(sample, self._signature, self._unpacker))
                    errors = self._executor.run_warmup(requests)
                except ShmserveError as error:
                    errors = [error]
                if errors:
                    logger.debug("%s failed to run warmup sample '%s'", subject, name)
                    failure = f"failed to run warmup sample '{name}'"
                    texts = [f"{failure}: {error.message}; " for error in errors]
                    raise InvalidArgument("".join(texts))

    def run(self, endpoint: str) -> None:
        """Connect the instance to the scheduler at `endpoint`, and serve until `Stop`."""
        self.attach(endpoint)
        control = self._context.control
        # The load has freed memory, which is returned to the system after the first pause.
        timeout_s: float | None = _TRIM_DELAY_S
        needs_trim = True
        while True:
            self.link.loop_reads = True
            if self._wait(timeout_s):
                self.link.receive()
            elif needs_trim and not control.inbox:
                trim_heap()
                needs_trim = False
            self.link.loop_stops_reading()
            while control.inbox:
                message = control.inbox.popleft()
                if isinstance(message, Stop):
                    return
                self._handle(message)
            if self._writer.abandoned_streams:
                self._writer.end_abandoned()
            if self.link.commands:
                needs_trim, timeout_s = True, _TRIM_DELAY_S
                self.serve_commands()
            else:
                timeout_s = self._metrics.send_if_due() or (_TRIM_DELAY_S if needs_trim else None)

    def serve_commands(self) -> None:
        """Execute the received messages of the scheduler, such as batches, in order."""
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
                if not self.link.is_connected_to(successor):
                    self.attach(successor)
            case CheckMemory():
                if context.device_memory is not None:
                    context.control.send(context.device_memory.check(message))
            case CheckReady(id=check_number):
                # In a thread, because the check may take long, and batches must continue.
                threading.Thread(
                    target=self._check_ready, args=(check_number,), daemon=True
                ).start()
            case MemoryDropped(memory_id=memory_id):
                with self.link.lock:
                    context.mappings.unmap(memory_id)
            case ProcessExited(process=pid):
                with self.link.lock:
                    context.mappings.unmap_process(pid)
                    self._output_memory.record_exit(pid)
                    if not self.link.connected:
                        self._output_memory.free_exited()
            case BaseException():
                raise message  # a thread of the model has detected the loss of the device
            case _:
                logger.warning("unexpected %s message from the supervisor", type(message).__name__)

    def _handle_released(self, message: ReleaseOutputs | ReaderExited) -> None:
        match message:
            case ReleaseOutputs(client_pid=pid, offsets=offsets, memory=memory):
                # The message may concern a predecessor with the same pid.
                if memory == self._output_memory.id:
                    self._output_memory.release(pid, offsets)
            case ReaderExited(pid=pid):
                self._output_memory.free_all(pid)

    def _check_ready(self, check_number: int) -> None:
        is_ready = False
        try:
            is_ready = self._backend.is_ready()
        except BaseException:  # SystemExit, too: a model must not end its worker
            logger.exception(
                "model '%s' failed in `is_ready`, and counts as not ready", self._context.model_name
            )
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
            self._output_memory.free_exited()
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


def _warmup_requests(sample: Sample, signature: Signature, unpacker: Unpacker) -> Iterator[Request]:
    """Yield the requests of a warm-up sample.

    Raises:
        InvalidArgument: The sample does not fit the model.
    """
    client_tensors = [tensor for tensor in sample.tensors if tensor.name in signature.inputs]
    # Clients do not send the control inputs of sequences, but a sample may contain them.
    control_tensors = [tensor for tensor in sample.tensors if tensor.name not in signature.inputs]
    signature.check("", client_tensors, ())
    schema, data = pack_inference(Inference(tuple(client_tensors)))
    for key in range(1, sample.batch_size + 1):
        request = unpacker.request(Work(key, 0, schema, data))
        for tensor in control_tensors:
            assert isinstance(tensor.data, bytes)
            view = memoryview(bytearray(tensor.data))
            request.inputs[tensor.name] = Input(tensor.name, tensor.datatype, tensor.shape, view)
        yield request


def _create_context(start: WorkerStart, device: str, control: SupervisorLink) -> ModelContext:
    device_memory = DeviceMemory()
    kind, _, device_number = device.partition(":")
    pin = partial(device_memory.pin, device=int(device_number)) if kind == "cuda" else None
    arena = Arena(start.arena_byte_size)
    mappings = Mappings(device_memory.open, pin)
    start_fields = {field.name: getattr(start, field.name) for field in fields(start)}
    return ModelContext(
        **(start_fields | {"device": device}),
        control=control,
        arena=arena,
        output_memory=OutputMemory(arena),
        mappings=mappings,
        workspace=Workspace(control, mappings, device, device_memory.synchronize),
        device_memory=device_memory,
    )


def _set_signals() -> int:
    """Ignore termination signals; return the descriptor to which SIGUSR2 writes stacks."""
    faulthandler.enable()
    stacks_fd = os.memfd_create("stacks", os.MFD_CLOEXEC)
    # The supervisor truncates the file before it reads it.
    fcntl.fcntl(stacks_fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(signal.SIGUSR2, file=stacks_fd, all_threads=True)
    # The supervisor decides when a worker exits. SIG_IGN instead of a handler would be inherited
    # by child processes of a model.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, _ignore)
    return stacks_fd


def _ignore(signal_number: int, frame: object) -> None:
    pass


def _limit_threads(thread_count: int) -> None:
    """Limit the threads of torch, even if only the model imports it."""
    torch = sys.modules.get("torch")
    if torch is None:
        os.environ["OMP_NUM_THREADS"] = str(thread_count)
    else:
        torch.set_num_threads(thread_count)


def _torch_device_name(name: str) -> str:
    """Return torch's name of a device; "gpu:1" is the second accelerator of the host."""
    kind, _, number = name.partition(":")
    if kind != "gpu":
        return name
    from shmserve.workers.device import accelerator_kind

    return f"{accelerator_kind()}:{number}"


def _device_byte_size() -> int:
    """Return the accelerator memory of this process in bytes, as reported by torch.

    A process that has not initialised CUDA in torch has none.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
