"""The context of an instance: its start parameters, its resources, and the errors of its model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shmserve.errors import Internal, ShmserveError, Unavailable, clip
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.messages.supervision import ModelWarned, WorkerStart
from shmserve.ipc.trace import TraceContext
from shmserve.workers.batch.backend_request import CopyCounter
from shmserve.workers.links import SupervisorLink
from shmserve.workers.memory.device_memory import (
    DeviceMemory,
    free_cached_memory,
    is_device_lost,
    is_out_of_memory,
)
from shmserve.workers.memory.outputs import OutputMemory
from shmserve.workers.memory.workspace import Workspace
from shmserve.workers.user_code import describe_error, format_error


@dataclass(slots=True)
class Stopwatch:
    """The timestamps within an execution that only a backend can take.

    Timestamps are in monotonic ns. 0 means not taken; the time before or after `execute` is then
    used instead.
    """

    input_end_ns: int = 0  # inputs are ready
    output_start_ns: int = 0  # the model has returned


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext(WorkerStart):
    """The start parameters and the resources of an instance, for its backend.

    Attributes:
        control: The link to the supervisor.
        arena: The memory for tensors of this process.
        output_memory: The blocks of the arena for outputs.
        mappings: The views of other processes' memory.
        workspace: Leases of the device's shared workspace.
        stopwatch: The timestamps within an execution that only the backend can take.
        device_memory: The memory of clients and other processes on devices.
        copy_counter: The counter of copied bytes of tensors.
        spans: The spans of the model's calls of other models since the last batch, encoded as in
            ipc/trace.py.

    The attributes of `WorkerStart` are available, too. Backends use `model_name`, `version`,
    `model_dir` (the model's folder), `device` (torch's name: "cpu" or "cuda:0"), `threads` (the
    number of compute threads) and `backend_config` (the settings of --backend-config as strings).
    """

    control: SupervisorLink
    arena: Arena
    output_memory: OutputMemory
    mappings: Mappings
    workspace: Workspace
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    device_memory: DeviceMemory | None = None
    copy_counter: CopyCounter = field(default_factory=CopyCounter)
    spans: list[bytes] = field(default_factory=list)

    @property
    def version_dir(self) -> Path:
        """Return the folder of the version's files: model_dir/version."""
        return self.model_dir / self.version

    def warn(self, topic: str, text: str) -> None:
        """Log a warning, unless an instance of the version has logged one of this topic before."""
        self.control.send(ModelWarned(topic, text))

    def warn_of_writes(self) -> None:
        """Log that the model writes into its inputs."""
        reason = "writes into its inputs, so that they are copied from now on"
        self.warn("written inputs", f"model '{self.model_name}' {reason}")

    def model_file(self, names: Iterable[str], display_name: str) -> Path:
        """Return the first of the files `names` that exists in the version folder.

        Raises:
            Unavailable: The file is unreadable, or none exists; the message names `display_name`.
        """
        for name in names:
            path = self.version_dir / name
            if path.exists():
                if not os.access(path, os.R_OK):
                    raise Unavailable(f"the server's user has no permission to read '{path}'")
                return path
        hint = "" if "/" in display_name else found_files(self.version_dir)
        raise Unavailable(
            f"unable to find '{self.version}/{display_name}' for model instance "
            f"'{self.instance_name}'{hint}"
        )


def found_files(version_dir: Path) -> str:
    """Return a hint at a version's files for the error of a missing file, or ""."""
    names = ", ".join(sorted(path.name for path in version_dir.glob("[!._]*") if path.exists()))
    if version_dir.is_symlink():  # a class on the command line: it has no configuration
        return f" in '{version_dir.resolve()}' (found {clip(names) or 'no file'})"
    if names:
        return f" (found {clip(names)}: set default_model_filename)"
    for path in version_dir.parent.glob("model.*"):
        return f" (found {path.name} beside the folder '{version_dir.name}': move it into it)"
    return ""


logger = logging.getLogger(__name__)


class WrongResponseCount(Exception):
    """The error for a backend that did not return one response for each request."""

    def __init__(self, request_count: int, responses: object) -> None:
        response_count = len(responses) if isinstance(responses, list) else 0
        super().__init__(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{request_count}, and InferenceResponse(s) size "
            f"is:{response_count}"
        )


def is_model_error(error: BaseException) -> bool:
    """Check whether an error is the model's, not one of the server, memory or device."""
    is_device_error = is_device_lost(error) or is_out_of_memory(error)
    return not (isinstance(error, ShmserveError | WrongResponseCount) or is_device_error)


def client_error(
    context: ModelContext, error: BaseException, work: Work | None = None
) -> ShmserveError:
    """Log an error of a model, and return the error for the client of the request.

    Args:
        context: The instance.
        error: The error.
        work: The request, if it could be read.

    Raises:
        BaseException: `error` itself if the device is lost. The process exits then, and its
            requests run in its successor.
    """
    if isinstance(error, ShmserveError):
        return error
    model = context.model_name
    prefix = f"Failed to process the request(s) for model '{context.instance_name}', message:"
    if isinstance(error, WrongResponseCount):
        return Internal(f"{prefix} {error}")
    fields = {}
    if work is not None:
        fields = {"request_id": work.request_id, "trace_id": TraceContext.of(work.trace).trace_id}
    if text := format_error(error, context.version_dir):
        logger.error("model '%s' failed\n%s", model, text, extra=fields)
    else:
        logger.error("model '%s' failed", model, exc_info=error, extra=fields)
    if is_device_lost(error):
        raise error
    if is_out_of_memory(error):
        free_cached_memory()
        return Unavailable(
            f"there is not enough memory on device '{context.device}' for model '{model}' to run "
            "this request"
        )
    return Internal(f"{prefix} {describe_error(error)}")
