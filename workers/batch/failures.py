"""Failures of a model, and the errors that its clients receive."""

from __future__ import annotations

import logging

from shmserve.errors import Internal, ShmserveError, Unavailable
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.trace import TraceContext
from shmserve.workers.context import ModelContext
from shmserve.workers.memory.device_memory import free_cached, lost, out_of_memory
from shmserve.workers.user_code import in_words

logger = logging.getLogger(__name__)


class WrongCount(Exception):
    """An error of a backend that did not return one response for each request."""

    def __init__(self, requests: int, responses: int) -> None:
        super().__init__(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{requests}, and InferenceResponse(s) size "
            f"is:{responses}"
        )


def is_models_own(error: BaseException) -> bool:
    """Check whether an error is the model's, not one of the server, memory or device."""
    return not (
        isinstance(error, ShmserveError | WrongCount) or lost(error) or out_of_memory(error)
    )


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
    failed = f"Failed to process the request(s) for model '{context.instance_name}', message:"
    if isinstance(error, WrongCount):
        return Internal(f"{failed} {error}")
    ids = {}
    if work is not None:
        ids = {"request_id": work.request_id, "trace_id": TraceContext.of(work.trace).trace_id}
    logger.error("model '%s' failed", model, exc_info=error, extra=ids)
    if lost(error):
        raise error
    if out_of_memory(error):
        free_cached()
        return Unavailable(
            f"not enough memory on device '{context.device}' for model '{model}' to run "
            "this request"
        )
    return Internal(f"{failed} {in_words(error)}")
