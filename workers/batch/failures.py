"""Errors for clients, from what a model, reading its inputs or writing its outputs raised."""

from __future__ import annotations

import logging

from shmserve.errors import Internal, ShmserveError, Unavailable
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


class Failures:
    """Explains what one instance's model raises, and logs it."""

    def __init__(self, model: str, instance: str, device: str) -> None:
        self._model = model
        self._instance = instance
        self._device = device

    @staticmethod
    def is_models_own(error: BaseException) -> bool:
        """Whether it is neither this server's error, nor says that memory is full or a device
        lost."""
        return not (
            isinstance(error, ShmserveError | WrongCount)
            or _device_lost(error)
            or _out_of_memory(error)
        )

    def explain(self, error: BaseException, request_id: str = "") -> ShmserveError:
        """The error for the client. Raises `error` itself where the device is lost: the process
        ends then, another one starts, and what was in it runs there."""
        if isinstance(error, ShmserveError):
            return error
        failed = f"Failed to process the request(s) for model '{self._instance}', message:"
        if isinstance(error, WrongCount):
            return Internal(f"{failed} {error}")
        told = {"request_id": request_id or None}
        logger.error("model '%s' failed", self._model, exc_info=error, extra=told)
        if _device_lost(error):
            raise error
        if _out_of_memory(error):
            _free_device_memory()
            return Unavailable(
                f"there is not enough memory on device '{self._device}' for model "
                f"'{self._model}' to run this request"
            )
        return Internal(f"{failed} {in_words(error)}")


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
