"""Failures of a model: the errors that clients get, and whether copies of its inputs would cure it.

Inputs are read-only views, and a model that writes into them fails, in whatever words. So what
fails with views is run once more with copies: if these cure it, the model gets copies from then on.
One that keeps failing for reasons of its own is believed for a while, after so many vain tries, so
that its failures do not cost double.
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
    """A backend returned something else than one response for each request."""

    def __init__(self, requests: int, responses: int) -> None:
        super().__init__(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{requests}, and InferenceResponse(s) size "
            f"is:{responses}"
        )


@dataclass(eq=False)
class Failures:
    """Explains what one instance's model raises, and logs it."""

    _context: ModelContext

    @staticmethod
    def is_models_own(error: BaseException) -> bool:
        """Whether it is neither this server's error, nor says that memory is full or a device
        lost."""
        return not (
            isinstance(error, ShmserveError | WrongCount) or lost(error) or out_of_memory(error)
        )

    def is_too_large(self, error: BaseException, requests: int) -> bool:
        """Whether `error` says that memory was too small for so many requests, half of which may
        fit."""
        return requests > 1 and out_of_memory(error)

    def make_room(self) -> None:
        """Give back what torch keeps on the device for tensors to come."""
        free_cached()

    def explain(self, error: BaseException, work: Work | None = None) -> ShmserveError:
        """The error for the client of a request. Raises `error` itself where the device is lost:
        the process ends then, another one starts, and what was in it runs there."""
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
_BELIEVED = 16  # failures after each further vain try


class InputPolicy:
    """Zero-copy or copied inputs for one model, learnt from its failures. `copies`: it gets copies,
    for good."""

    def __init__(self) -> None:
        self.copies = False
        self._vain = 0
        self._believed = 0

    def may_cure(self, request: Request) -> bool:
        """Whether a request that has failed is to be run again with copies."""
        if not any(item.shared for item in request.inputs.values()):
            return False
        if self._believed:
            self._believed -= 1
            return False
        return True

    def tried(self, cured: bool) -> None:
        """Take note of a second run, with copies."""
        if cured:
            self.copies = True
        self._vain += 1
        if self._vain >= _TRIED_IN_A_ROW:
            self._believed = _BELIEVED
