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
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from shmserve import logs
from shmserve.errors import Internal, ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.publications import MemoryDropped, ProcessExited
from shmserve.ipc.messages.supervision import (
    Attach,
    CompleteConfig,
    ConfigCompleted,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    Stop,
    WorkerStart,
    WorkerStarted,
    decode_start,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.processes import raise_oom_score, set_process_title
from shmserve.ipc.transport.zmtp import ENDPOINT_PREFIX, Dealer
from shmserve.workers import backends, environment
from shmserve.workers.backends import Backend, ModelContext
from shmserve.workers.backends.python import log_thread_exception
from shmserve.workers.instance import WorkerInstance
from shmserve.workers.links.processes import SupervisorLink
from shmserve.workers.links.workspace import Workspace
from shmserve.workers.memory.device_memory import DeviceMemory
from shmserve.workers.memory.outputs import OutputMemory
from shmserve.workers.sequences import read_states
from shmserve.workers.user_code import (
    describe_error,
    model_traceback,
    source_location,
    traceback_line,
)

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
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
    stacks_fd = _set_signals()
    threading.excepthook = log_thread_exception
    device = _torch_device_name(start.device)
    set_process_title(f"worker {model}.{index} {device}")
    raise_oom_score(OOM_SCORE_ADJ)
    _limit_threads(start.threads)
    # As in Triton: a model that parses its command line finds no arguments, not the zygote's.
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
                        logger.warning("unexpected %s from the supervisor", type(message).__name__)

    def _complete_config(self, config: ModelSpec) -> ConfigCompleted:
        return ConfigCompleted(self._make_backend(config).complete_config(config.source))

    def _load(self, config: ModelSpec) -> InstanceLoaded:
        backend = self._make_backend(config)
        if config.sequence_batching is not None:
            # Called before the model is loaded: this raises if a data file cannot be read.
            read_states(config, self._context.model_dir)
        # One instance of each group logs warnings about the model.
        is_first = self._context.instance_name.endswith("_0")
        with contextlib.nullcontext() if is_first else logs.without_warnings():
            backend.load(config)
            logs.enable()
            self._instance = WorkerInstance(self._context, backend, config)
            self._instance.warm_up()
        self._check_access()
        # The current objects are permanent: the collector need not scan them, nor unshare their
        # pages.
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
            # The kernel checks this like the opening of a tensor's memory.
            os.readlink(f"/proc/{os.getppid()}/exe")
        except OSError as error:
            raise Internal(
                f"its process cannot access the server's sockets and memory ({error.strerror}): a "
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
                logger.exception("model '%s' failed to finalize", self._context.model_name)

    def _run_or_report(self, step: Callable[[], ConfigCompleted | InstanceLoaded]) -> bool:
        pid = os.getpid()
        try:
            report = step()
            if os.getpid() != pid:
                sys.exit(0)
            self._control.send(report)
        except ShmserveError as error:
            context = self._context
            position = traceback_line(error.message, context.model_name, context.version_dir)
            self._control.send(LoadFailed(error.code, error.message, position))
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


def _create_context(start: WorkerStart, device: str, control: SupervisorLink) -> ModelContext:
    device_memory = DeviceMemory()
    kind, _, number = device.partition(":")
    pin = partial(device_memory.pin, device=int(number)) if kind == "cuda" else None
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
    # The supervisor decides when to exit. A handler, because child processes of a model would
    # inherit SIG_IGN.
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
