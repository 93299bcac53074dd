"""An instance: the states of its process, changes of the set of instances, loads that hang.

If the `instance_group` of a serving version changes, every instance whose kind, device and rate
limit are still configured keeps running under its own index and name. A failed instance is always
replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shmserve.errors import IllegalEvent, Unavailable
from shmserve.ipc.model_spec import (
    MAX_INSTANCES,
    MIN_INSTANCES,
    ModelSpec,
    RateLimit,
    parse_instance_bound,
)
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.processes.children import Child, RestartBackoff

logger = logging.getLogger(__name__)

FIRST_REPORT_S = 30.0
# Maximum number of unread messages of a worker; a correct worker never sends so many.
_MAX_UNREAD_MESSAGES = 16
_STACK_WAIT_S = 0.1
_MAX_STACK_WAITS = 10
_MAX_STACK_BYTES = 1 << 20
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')

T = TypeVar("T")


class InstanceState(StrEnum):
    """The state of an instance's process."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RETIRING = "retiring"  # it finishes its requests, then exits
    WAITING = "waiting"  # it has exited, and is restarted after a pause
    FAILED = "failed"  # it has exited too often, and is not restarted
    STOPPED = "stopped"


_ON_STOP = {"stop": InstanceState.STOPPED}
_ON_FAILURE = {"exited": InstanceState.WAITING, "load_failed": InstanceState.WAITING, **_ON_STOP}
TRANSITIONS: Mapping[InstanceState, Mapping[str, InstanceState]] = {
    InstanceState.STARTING: {"started": InstanceState.LOADING, **_ON_FAILURE},
    InstanceState.LOADING: {"loaded": InstanceState.READY, **_ON_FAILURE},
    InstanceState.READY: {
        "retire": InstanceState.RETIRING,
        "exited": InstanceState.WAITING,
        **_ON_STOP,
    },
    InstanceState.RETIRING: {"exited": InstanceState.STOPPED, **_ON_STOP},
    InstanceState.WAITING: {
        "restart": InstanceState.STARTING,
        "abandon": InstanceState.FAILED,
        "load_failed": InstanceState.WAITING,  # reported after the exit of the process
        **_ON_STOP,
    },
    InstanceState.FAILED: _ON_STOP,
    InstanceState.STOPPED: {
        "exited": InstanceState.STOPPED,
        "load_failed": InstanceState.STOPPED,
        **_ON_STOP,
    },
}


def create_inbox() -> asyncio.Queue[Any]:
    """Return a new bounded queue for the messages that a worker sends about itself."""
    return asyncio.Queue(_MAX_UNREAD_MESSAGES)


@dataclass(slots=True, eq=False)
class Instance:
    """An instance of a model, with its worker process while the process exists.

    Attributes:
        stacks_fd: The worker's file descriptor for stack traces, from `WorkerStarted`.
        checks_ready: Whether the model implements its own readiness check.
        device_byte_size: The accelerator memory that the loaded model uses.
        hangs: Whether the log has reported that the load takes long.
    """

    index: int
    name: str
    device: str  # "cpu" or "gpu:ID"
    kind: str  # the group's kind without the prefix KIND_
    device_id: int
    rate_limit: RateLimit = field(default_factory=RateLimit)
    state: InstanceState = InstanceState.STARTING
    child: Child | None = None
    stacks_fd: int = -1
    inbox: asyncio.Queue[Any] = field(default_factory=create_inbox)
    ready_at: float = 0.0  # on the monotonic clock
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    crashes: int = 0  # crashes since the instance last executed a request
    failed_loads: int = 0  # consecutive failed loads
    checks_ready: bool = False
    device_byte_size: int = 0
    hangs: bool = False

    @property
    def alive(self) -> bool:
        """Return whether the instance has a process that is not known to have ended."""
        return self.child is not None and self.child.alive

    @property
    def placement(self) -> tuple[str, int, RateLimit]:
        """Return kind, device and rate limit; instances with equal values are interchangeable."""
        return self.kind, self.device_id, self.rate_limit

    def transition(self, event: str) -> None:
        """Apply an event to the state; raise IllegalEvent if the state does not allow it."""
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise IllegalEvent(f"event {event} in state {self.state}") from None

    def mark_loaded(self, checks_ready: bool, device_byte_size: int) -> None:
        """Set the state to ready, and store the properties that the worker has reported."""
        self.checks_ready, self.device_byte_size = checks_ready, device_byte_size
        self.transition("loaded")
        self.ready_at = time.monotonic()
        self.failed_loads = 0

    async def discard(self) -> Child | None:
        """Kill the process that failed to load, if it is alive, and return the process."""
        child = self.child
        if child is not None and child.alive:
            child.kill_reason = "it has not loaded"
            child.kill()
            await child.until_exit()
        self.child = None
        self.transition("load_failed")
        return child


class Bounds(NamedTuple):
    """The minimum and the maximum number of instances of a model that is scaled automatically."""

    minimum: int
    maximum: int


def bounds_of(config: ModelSpec) -> Bounds | None:
    """Return the bounds of a validated configuration, or None for a fixed number of instances."""
    maximum = parse_instance_bound(config.parameters.get(MAX_INSTANCES, ""))
    minimum = parse_instance_bound(config.parameters.get(MIN_INSTANCES, ""))
    return None if maximum is None else Bounds(minimum or 1, maximum)


def with_instance_count(config: ModelSpec, count: int) -> ModelSpec:
    """Return a configuration with one instance group changed to `count` instances.

    The instances are distributed evenly over the devices. Only `instance_group` is changed:
    `source`, the JSON for clients, still has the configured number.
    """
    (group,) = config.instance_group
    devices = [(gpu,) for gpu in group.gpus] if group.kind == "KIND_GPU" else [group.gpus]
    shares = [(count + index) // len(devices) for index in reversed(range(len(devices)))]
    pairs = zip(devices, shares, strict=True)
    groups = (replace(group, gpus=gpus, count=share) for gpus, share in pairs if share)
    return replace(config, instance_group=tuple(groups))


def expand_instances(config: ModelSpec, running_count: int = 0) -> list[Instance]:
    """Return the instances of a configuration, in order; an ensemble has none.

    Args:
        config: The configuration of the model.
        running_count: The number of instances to keep, if the configuration has bounds.
    """
    instances, bounds = _expand(config), bounds_of(config)
    if bounds is None:
        return instances
    count = max(len(instances), bounds.minimum, min(running_count, bounds.maximum))
    return instances if len(instances) == count else _expand(with_instance_count(config, count))


def _expand(config: ModelSpec) -> list[Instance]:
    instances: list[Instance] = []
    counts: Counter[str] = Counter()  # groups of equal names are numbered together
    for group in config.instance_group:
        on_gpu = group.kind == "KIND_GPU"
        for device_id in group.gpus if on_gpu else (0,):
            prefix = f"{group.name}_gpu{device_id}" if on_gpu else group.name
            device, kind = f"gpu:{device_id}" if on_gpu else "cpu", group.kind.removeprefix("KIND_")
            for _ in range(group.count):
                name, limit = f"{prefix}_{counts[prefix]}", group.rate_limiter
                counts[prefix] += 1
                instances.append(Instance(len(instances), name, device, kind, device_id, limit))
    return instances


class InstanceUpdate(NamedTuple):
    """A change of a version's instances to the instances of another spec.

    Attributes:
        spec: The spec that the version will have.
        config: The final configuration of `spec`.
        config_differs: Whether `config` differs from the current configuration.
        added_instances: The instances to start.
        removed_instances: The instances to retire.
    """

    spec: VersionSpec
    config: ModelSpec
    config_differs: bool
    added_instances: list[Instance]
    removed_instances: list[Instance]


def find_changes(
    current: Sequence[Instance], config: ModelSpec, running_count: int = 0
) -> tuple[list[Instance], list[Instance]]:
    """Return the instances to add and to remove for a configuration; change no instance.

    Args:
        current: The instances of the version.
        config: The new configuration.
        running_count: The number of instances to keep, see `expand_instances`.
    """
    surplus = [i for i in current if i.state not in (InstanceState.RETIRING, InstanceState.STOPPED)]
    usable_instances = [i for i in surplus if i.state is not InstanceState.FAILED]
    added_instances = expand_instances(config, running_count)
    for same_name in (True, False):  # instances with equal names first
        for instance in added_instances[:]:
            equivalent = (i for i in usable_instances if i.placement == instance.placement)
            match = next((i for i in equivalent if i.name == instance.name or not same_name), None)
            if match is not None:
                usable_instances.remove(match)
                surplus.remove(match)
                added_instances.remove(instance)
    used_indexes = {instance.index for instance in current}
    free_indexes = (index for index in itertools.count() if index not in used_indexes)
    for instance in added_instances:
        instance.index = next(free_indexes)
    return added_instances, surplus


# --- loads that hang


async def stacks_of(instance: Instance) -> str:
    """Return the stacks of a worker's threads as faulthandler writes them, innermost frames first.

    The worker writes its stacks on SIGUSR2, even while the model's code blocks. The result is empty
    if the worker has exited or writes nothing.
    """
    child = instance.child
    if child is None or not child.alive:  # another process may already have the pid
        return ""
    try:
        path = f"/proc/{child.pid}/fd/{instance.stacks_fd}"
        if not os.readlink(path).startswith("/memfd:stacks"):
            return ""  # the model has closed the file, and opened another one
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # the worker has ended, or its model has closed the file
        return ""
    try:
        os.ftruncate(fd, 0)
        child.kill(signal.SIGUSR2)
        await _await_written(child, fd)
        return os.read(fd, _MAX_STACK_BYTES).decode(errors="replace")
    finally:
        os.close(fd)


async def _await_written(child: Child, fd: int) -> None:
    """Wait until the file no longer grows: faulthandler writes in pieces and signals no end."""
    size = 0
    for _ in range(_MAX_STACK_WAITS):
        await asyncio.sleep(_STACK_WAIT_S)
        previous_size, size = size, os.fstat(fd).st_size
        if not child.alive or 0 < size == previous_size:
            return


def find_model_frame(stacks: str, folder: Path) -> str:
    """Return the innermost frame of code in a model's folder; "" for none.

    The thread that loads the model is searched first. An example of a result is "initialize, line 7
    of 1/model.py".
    """
    threads = sorted(stacks.split("\n\n"), key=lambda thread: "/workers/main.py" not in thread)
    for path, line, function in _FRAME.findall("\n".join(threads)):
        if path.startswith(f"{folder}/"):
            return f"{function}, line {line} of {path.removeprefix(f'{folder}/')}"
    return ""


def format_stacks(stacks: str) -> str:
    """Format stacks as one log line: threads separated by "|", innermost frames first."""
    threads = filter(None, map(_FRAME.findall, stacks.split("\n\n")))
    lines = (" < ".join(f"{name} ({path}:{line})" for path, line, name in part) for part in threads)
    return " | ".join(lines) or "not available"


async def wait_for_load(
    load: Awaitable[T], instance: Instance, folder: Path, max_s: float, on_hang: Callable[[], None]
) -> T:
    """Wait for a load; log the instance's stacks after 30 s and then at doubling intervals.

    Args:
        load: Completes when the instance has loaded its model.
        instance: The instance that loads.
        folder: The folder with the model's code.
        max_s: The time limit of the load in seconds; 0 for none.
        on_hang: Called with the first report, after `instance.hangs` is set.

    Raises:
        Unavailable: The limit has expired. The text names the frame that the model hangs in.
    """
    report_task = asyncio.ensure_future(_report_hang(instance, on_hang))
    try:
        async with asyncio.timeout(max_s or None):
            return await load
    except TimeoutError:
        stacks = await stacks_of(instance)
        logger.error(
            "instance '%s' has not loaded within %g s; its stacks: %s",
            instance.name,
            max_s,
            format_stacks(stacks),
        )
        frame = find_model_frame(stacks, folder)
        raise Unavailable(
            f"the model has not loaded within {max_s:g} s (--load-timeout-secs)"
            + (f": it hangs in {frame}" if frame else "")
        ) from None
    finally:
        report_task.cancel()
        instance.hangs = False


async def _report_hang(instance: Instance, on_hang: Callable[[], None]) -> None:
    pause_s, total_s = FIRST_REPORT_S, 0.0
    while True:
        await asyncio.sleep(pause_s)
        total_s, pause_s = total_s + pause_s, 2 * pause_s
        stacks = format_stacks(await stacks_of(instance))
        logger.warning(
            "instance '%s' has been loading for %g s; its stacks: %s",
            instance.name,
            total_s,
            stacks,
        )
        if not instance.hangs:
            instance.hangs = True
            on_hang()
