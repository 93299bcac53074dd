"""Failures of a model: the errors for clients, and the decision to retry with copies of inputs.

Inputs are read-only views, so a model that writes into them fails. A request that fails with views
is therefore retried once with copies. If the retry succeeds, the model receives copies for later
requests. If several retries fail, the next failures are not retried.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shmserve.errors import Internal, ShmserveError, Unavailable
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.trace import TraceContext
from shmserve.workers.batch.request import Request
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


@dataclass(eq=False)
class Failures:
    """The failures of one instance's model, which are logged and converted to client errors."""

    _context: ModelContext

    @staticmethod
    def is_models_own(error: BaseException) -> bool:
        """Check whether an error is the model's, not one of the server, memory or device."""
        return not (
            isinstance(error, ShmserveError | WrongCount) or lost(error) or out_of_memory(error)
        )

    def is_too_large(self, error: BaseException, requests: int) -> bool:
        """Check whether the batch was too large for the memory, so that half of it may fit."""
        return requests > 1 and out_of_memory(error)

    def make_room(self) -> None:
        """Release the device memory that torch caches."""
        free_cached()

    def explain(self, error: BaseException, work: Work | None = None) -> ShmserveError:
        """Return the error for the client of a request.

        Raises:
            BaseException: `error` itself if the device is lost. The process exits then, and its
                requests run in its successor.
        """
        if isinstance(error, ShmserveError):
            return error
        model, instance = self._context.model_name, self._context.instance_name
        failed = f"Failed to process the request(s) for model '{instance}', message:"
        if isinstance(error, WrongCount):
            return Internal(f"{failed} {error}")
        told = {}
        if work is not None:
            trace_id = TraceContext.of(work.trace).trace_id
            told = {"request_id": work.request_id, "trace_id": trace_id}
        logger.error("model '%s' failed", model, exc_info=error, extra=told)
        if lost(error):
            raise error
        if out_of_memory(error):
            free_cached()
            return Unavailable(
                f"there is not enough memory on device '{self._context.device}' for model "
                f"'{model}' to run this request"
            )
        return Internal(f"{failed} {in_words(error)}")


_TRIED_IN_A_ROW = 16
_BELIEVED = 16  # the failures without a retry after each further failed retry


class InputPolicy:
    """The decision whether a model receives copies of its inputs, based on its failures."""

    def __init__(self) -> None:
        self.copies = False
        self._vain = 0
        self._believed = 0

    def may_cure(self, request: Request) -> bool:
        """Check whether a failed request should be retried with copies."""
        if not any(item.shared for item in request.inputs.values()):
            return False
        if self._believed:
            self._believed -= 1
            return False
        return True

    def tried(self, cured: bool) -> None:
        """Record whether a retry with copies has succeeded."""
        if cured:
            self.copies = True
        self._vain += 1
        if self._vain >= _TRIED_IN_A_ROW:
            self._believed = _BELIEVED
