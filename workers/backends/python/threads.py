"""What a model's own thread raises is told to the clients whose response senders it had."""

from __future__ import annotations

import gc
import logging
import threading
import traceback

from shmserve.workers.backends.python.request import DecoupledRequest
from shmserve.workers.backends.python.response import InferenceResponseSender

logger = logging.getLogger(__name__)


def ended(args: threading.ExceptHookArgs) -> None:
    """A thread has raised: log it, and let go of what its functions had. It is a
    `threading.excepthook`; a model may have its own."""
    if args.exc_type is not SystemExit and args.thread is not None:
        logger.error("thread '%s' of the model failed", args.thread.name, exc_info=args.exc_value)
    for frame, _ in traceback.walk_tb(args.exc_traceback):
        for value in gc.get_referents(frame):
            if isinstance(value, DecoupledRequest):
                value = value.get_response_sender()
            if isinstance(value, InferenceResponseSender):
                value._raised = args.exc_value
    # Else, where one of their variables has the error, it has them until they are collected.
    traceback.clear_frames(args.exc_traceback)
