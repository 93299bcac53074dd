"""The imports of a native model: tensor annotations and the context of an instance.

    from shmserve.model import FP32
    from torch import Tensor

    class Digits:
        max_batch_size = 32

        def predict(self, image: FP32[Tensor, 1, 8, 8]) -> FP32[Tensor, 10]:
            ...

`FP32[Tensor, 1, 8, 8]` reads: float32, arrives as a torch tensor, 1 x 8 x 8 after the batch
dimension; -1 is a dimension of any size. With `numpy.ndarray` in the place of `Tensor` it arrives
as a numpy array. To a type checker it is the array type.

What the class may have besides `predict`:

    max_batch_size = 32         of one batch, in rows; 0: no batch dimension
    max_queue_delay_us = 0      how long a request may wait for others to share its batch
    max_streams = 64            requests that a `predict` which yields answers side by side

    instances = 1               how many there are, each a process; or `instance_group`, a list of
                                mappings as in a configuration
    min_instances, max_instances  the fewest and the most, as its load needs (guide/instances.md)

    ragged = ("x",)             inputs that come flat, one request after the other
    batch_input, batch_output   lists of mappings, as in a configuration, for these
    padding = {"x": {...}}      inputs that are filled up to one shape (guide/shapes.md)

    def load(self, context)     before the first batch, with a `Context`
    def is_ready(self)          whether it is, a bool: see below
    def unload(self)            after the last batch

`is_ready`, plain or `async def`, is asked whenever a client asks whether the model is ready,
between two batches, so it should be quick: an instance that does not say within 5 s does not
count. The model is ready while one of its instances says True, and none says False or raises (the
log has why).

A `predict` that yields hears of a client that has left at its next `yield`: a generator by
GeneratorExit, an asynchronous one also where it awaits, by asyncio.CancelledError. One that
computes for long between two of them looks at `Context.cancelled`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

__all__ = [
    "BF16",
    "BOOL",
    "BYTES",
    "FP16",
    "FP32",
    "FP64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "Context",
    "TensorType",
]


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a tensor as annotated: its protocol datatype, and its dims.

    Without the batch dimension; -1: any size.
    """

    datatype: str
    dims: tuple[int, ...]


class _Datatype:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, item: Any) -> Any:
        array, *dims = item if isinstance(item, tuple) else (item,)
        if not dims or not all(type(dim) is int and (dim > 0 or dim == -1) for dim in dims):
            raise TypeError(
                f"{self._name}[array type, dim, ...] needs dimensions, each a positive integer or "
                f"-1, found {dims}"
            )
        return Annotated[array, TensorType(self._name, tuple(dims))]

    def __repr__(self) -> str:
        return self._name


if TYPE_CHECKING:
    # To a checker the rest of the brackets is metadata of the array type.
    from typing import Annotated as BF16
    from typing import Annotated as BOOL
    from typing import Annotated as BYTES
    from typing import Annotated as FP16
    from typing import Annotated as FP32
    from typing import Annotated as FP64
    from typing import Annotated as INT8
    from typing import Annotated as INT16
    from typing import Annotated as INT32
    from typing import Annotated as INT64
    from typing import Annotated as UINT8
    from typing import Annotated as UINT16
    from typing import Annotated as UINT32
    from typing import Annotated as UINT64
else:
    BOOL = _Datatype("BOOL")
    UINT8 = _Datatype("UINT8")
    UINT16 = _Datatype("UINT16")
    UINT32 = _Datatype("UINT32")
    UINT64 = _Datatype("UINT64")
    INT8 = _Datatype("INT8")
    INT16 = _Datatype("INT16")
    INT32 = _Datatype("INT32")
    INT64 = _Datatype("INT64")
    FP16 = _Datatype("FP16")
    FP32 = _Datatype("FP32")
    FP64 = _Datatype("FP64")
    BF16 = _Datatype("BF16")
    BYTES = _Datatype("BYTES")

# Asks whether the request that the running code answers is cancelled; set by who runs it.
IS_CANCELLED: ContextVar[Callable[[], bool]] = ContextVar("is_cancelled", default=lambda: False)


class Lease(Protocol):
    """So many bytes of a workspace, for a `with` block, or in a coroutine an `async with` block."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *_: object) -> None: ...


def _no_workspace(byte_size: int) -> Lease:
    raise RuntimeError("only a model that a server runs has a workspace")


@dataclass(frozen=True, slots=True)
class Context:
    """The argument of a model's `load(self, context)`.

    `device` is torch's name for where the instance runs ("cpu", "cuda:0"), `directory` the folder
    of the model's file, `parameters` the strings in the configuration's `parameters`, and what
    `shmserve serve FILE.py:CLASS --set NAME=VALUE` says.
    """

    name: str
    version: str
    device: str
    directory: Path
    parameters: Mapping[str, str] = field(default_factory=dict)
    lease: Callable[[int], Lease] = field(default=_no_workspace, repr=False, compare=False)

    def workspace(self, byte_size: int) -> Lease:
        """So many bytes of the device's shared workspace, as a torch tensor of uint8, for a with
        block in `predict`:

            with self.context.workspace(1 << 30) as buffer:
                ...

        It waits until the pool has them; who leaves the block gives them back, and must not use the
        buffer any more. What is in it at first is anybody's. Ask for all that an execution needs at
        once, and call no other model meanwhile. In a coroutine it is `async with`: the others of
        the model go on while it waits. The pool's size is the server's flag
        `--workspace-byte-size`; raises ShmserveError without one, or for more than all of it.
        """
        return self.lease(byte_size)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any more for the responses that are being yielded here: in the body
        of a `predict` that yields, in its own thread or task; elsewhere False."""
        return IS_CANCELLED.get()()
