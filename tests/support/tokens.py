"""Detection of lost memory: lent tokens that were dropped before they were settled."""

import gc
import sys
from pathlib import Path
from types import FrameType

from shmserve.ipc.memory import lent

LOST_TOKENS: list[str] = []  # for each lost token, the frames in which it was dropped
_ROOT = Path(__file__).parents[2]  # the checkout may have any name, and may contain other packages
OWN_FOLDERS = tuple(f"{_ROOT / package}/" for package in ("shmserve", "ipc", "workers"))
_collecting: list[str] = []


def _server_frames() -> list[FrameType]:
    frame_types: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)  # the caller of the collector's callback
    while frame is not None:
        if frame.f_code.co_filename.startswith(OWN_FOLDERS):
            frame_types.append(frame)
        frame = frame.f_back
    return frame_types


def _on_collected(token: lent.Token) -> None:
    # A value of an ensemble may have references without memory or credits.
    holds_memory = getattr(token, "memory", token) or getattr(token, "held_credits", ())
    if token._reference_count <= 0 or not holds_memory:
        return
    # The collector also finds objects of earlier tests, so a collected token has no frames.
    frames = [] if _collecting else _server_frames()
    if frames:
        stack = " <- ".join(f"{f.f_code.co_name} ({f.f_lineno})" for f in frames[:4])
        LOST_TOKENS.append(f"{type(token).__name__} was dropped while used in {stack}")


def _on_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "start":
        _collecting.append(phase)
    else:
        _collecting.clear()


def watch() -> None:
    """Record lost tokens from now on."""
    gc.callbacks.append(_on_collection)
    lent.Token.__del__ = _on_collected  # type: ignore[attr-defined]
