"""Packing: written outputs to the packed `Inferred` of a response, from cached templates.

Programs ask for the same again and again, and a model's responses have few templates: names, types
and shapes. What follows from these alone is known, and only the bytes of small outputs are put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import Inferred, PackedTemplate, pack_inferred
from shmserve.workers.batch.request import Copied, Request, Response

_MOST_BODIES = 16
_MOST_TEMPLATES = 256


class Ready(NamedTuple):
    """An output to be written: `data` is the wire form (BYTES), or an array of it (a tensor, if it
    goes to a device). `at`: where it is already, and may stay, as an input that was returned."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any
    byte_size: int
    at: Place | None = None


class ResponsePacker:
    """Packs the responses of one model."""

    def __init__(self, copied: Copied) -> None:
        self._copied = copied
        self._templates: dict[Any, PackedTemplate | None] = {}  # None: seen once
        # By `_array_key`: what the request wanted, the template, and the bytes that go into it.
        self._inline: dict[Any, tuple[Any, PackedTemplate, int]] = {}

    def known(self, request: Request, response: Response) -> bytes | None:
        """The packed response, where one to such a request, of arrays of the same types and shapes,
        was inline and right before; else None."""
        if request.placed or response.parameters:
            return None
        known = self._inline.get(_array_key(request, response))
        if known is None or known[0] is not request.requested:
            return None
        _, template, byte_size = known
        self._copied.outputs += byte_size
        return template.fill([output.data.tobytes() for output in response.outputs])

    def pack(
        self, ready: list[Ready], data: list[bytes | Place], request: Request, response: Response
    ) -> bytes:
        """The response, packed; put together from the template of one before where there is one."""
        key = _wire_key(ready)
        if not response.parameters:
            inline = [where for where in data if isinstance(where, bytes)]
            if len(inline) == len(data):
                packed = self._filled(key, inline, ready)
                if not request.placed:
                    self._remember(request, response, ready)
                return packed
            known = request.bodies.get(key)
            if known is not None:
                return known
        packed = pack_inferred(Inferred(_refs(ready, data), response.parameters))
        wanted = request.requested
        if (
            not response.parameters
            and len(request.bodies) < _MOST_BODIES
            and all(wanted[item.name].place is not None for item in ready)
        ):
            # All is where the request says: shapes and sizes are all that can be new next time.
            request.bodies[key] = packed
        return packed

    def _remember(self, request: Request, response: Response, ready: list[Ready]) -> None:
        key = _array_key(request, response)
        template = self._templates.get(_wire_key(ready))
        if key is None or template is None or len(ready) != len(response.outputs):
            return
        # Not what is sent in another byte order.
        if all(
            item.data is output.data for item, output in zip(ready, response.outputs, strict=True)
        ):
            if len(self._inline) >= _MOST_TEMPLATES:
                self._inline.clear()
            byte_size = sum([item.byte_size for item in ready])
            self._inline[key] = request.requested, template, byte_size

    def _filled(self, key: Any, inline: list[bytes], ready: list[Ready]) -> bytes:
        template = self._templates.get(key)
        if template is not None:
            return template.fill(inline)
        response = Inferred(_refs(ready, inline))
        if key in self._templates:  # the second time: it was worth remembering
            self._templates[key] = PackedTemplate(response)
        else:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            self._templates[key] = None
        return pack_inferred(response)


def _wire_key(ready: list[Ready]) -> Any:
    return tuple([(*item[:3], *item[4:]) for item in ready])


def _array_key(request: Request, response: Response) -> Any:
    """The key from which a response's checks and packing follow; None where not all of it
    are arrays of numbers."""
    key: list[Any] = [request.batch_size]
    for name, datatype, data in response.outputs:
        if type(data) is not np.ndarray or datatype == "BYTES":
            return None
        key += (name, datatype, data.dtype, data.shape)
    return tuple(key)


def _refs(ready: list[Ready], data: Sequence[bytes | Place]) -> tuple[TensorRef, ...]:
    return tuple([TensorRef(*item[:3], where) for item, where in zip(ready, data, strict=True)])
