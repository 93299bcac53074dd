"""Tensor annotations and the instance context for native models.

This file defines a model `digits`, which `shmserve serve digits.py:Digits` serves:

    import torch
    from shmserve.model import FP32
    from torch import Tensor

    class Digits:
        max_batch_size = 32

        def load(self, context):
            self.weights = torch.load(context.directory / "weights.pt")

        def predict(self, image: FP32[Tensor, 1, 8, 8]) -> FP32[Tensor, 10]:
            return image.flatten(1) @ self.weights

`FP32[Tensor, 1, 8, 8]` means float32, passed as a torch tensor of shape 1 x 8 x 8 after the batch
dimension; -1 is a dimension of any size. With `numpy.ndarray` instead of `Tensor` it is passed as a
numpy array. A type checker sees the array type.

The datatypes are BOOL, UINT8 to UINT64, INT8 to INT64, FP16, FP32, FP64, BF16 and BYTES. BF16 is
torch.bfloat16, or the bit patterns as uint16 in numpy. BYTES is a numpy array of bytes objects.

The class may have these attributes. A number after `=` is the default:

    max_batch_size = 32         the maximum number of rows in a batch; 0: `predict` receives one
                                request at a time, without a batch dimension. The default is 0 if
                                `predict` yields its responses, or has no inputs
    max_queue_delay_us = 0      the maximum time in microseconds that a request waits for others
                                to share its batch
    max_streams = 64            the concurrent requests of an instance whose `predict` yields
    instances = 1               the number of instances, each a process; on a host with GPUs, the
                                number for each GPU
    instance_group = [{...}]    the instances and their devices, as in a configuration; replaces
                                `instances`
    min_instances = 1           with `max_instances`, the minimum for autoscaling
    max_instances = N           the maximum for autoscaling; without it, the number is fixed
    batching_strategy = "..."   "prefer_batch" (default), "prefer_latency" or "adaptive"
    target_p99_ms = T           the latency target in milliseconds; by default there is none
    environment = "/envs/old"   the Python environment of the instances; by default the server's
    padding = {"x": {...}}      inputs that are padded to one shape
    ragged = ("x",)             inputs that are concatenated without padding
    batch_input = [{...}]       inputs that are created for each batch, as in a configuration
    batch_output = [{...}]      outputs that are split like ragged inputs, as in a configuration
    sequence_batching = {...}   the state and the scheduling of sequences, as in a configuration

`shmserve guide instances`, `batching`, `backends`, `shapes` and `sequences` explain them. The class
may also have these methods. They and `predict` are plain or `async def`, and share an event loop:

    def load(self, context)     called once, before the first batch, with a `Context`
    def is_ready(self)          returns a bool: see below
    def unload(self)            called once, after the last batch

The result of `predict` may be any array that numpy can read. A tuple has the outputs "output_0",
"output_1" and so on. The fields of a TypedDict, NamedTuple or dataclass are outputs of their names;
a key that is `NotRequired` may be missing.

`is_ready`, a function or coroutine, is called between two batches whenever a client requests the
readiness of the model. It must return a bool within 5 s; a later result does not count. The model
is ready if at least one instance returns True, and no instance returns False or raises an
exception. Exceptions are logged.

If the client of a `predict` that yields disconnects, the next `yield` raises GeneratorExit. In
an asynchronous generator, the next `await` raises asyncio.CancelledError. Code that
computes for long between two yields checks `Context.cancelled`.
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
    """The datatype and shape of a tensor annotation such as `FP32[Tensor, 1, 8, 8]`.

    Attributes:
        datatype: The datatype of the protocol: "FP32", "BYTES" and so on.
        dims: The dimensions without the batch dimension; -1 is a dimension of any size.
    """

    datatype: str
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.datatype not in (names := __all__[:-2]):
            raise TypeError(f"unknown datatype {self.datatype!r}; expected {', '.join(names)}")


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
    # A type checker reads `FP32[Tensor, 8]` as `Annotated[Tensor, 8]`: a Tensor with metadata.
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

# Returns whether the request of the running code is cancelled; set by the worker.
IS_CANCELLED: ContextVar[Callable[[], bool]] = ContextVar("is_cancelled", default=lambda: False)


class Lease(Protocol):
    """A lease of workspace memory, for a `with` block, or an `async with` block in a coroutine."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *_: object) -> None: ...


def _no_workspace(byte_size: int) -> Lease:
    raise RuntimeError("a workspace is available only while a server runs the model")


@dataclass(frozen=True, slots=True)
class Context:
    """The argument of a model's `load(self, context)`.

        def load(self, context):
            self.context = context
            self.weights = torch.load(context.directory / "weights.pt", map_location=context.device)

    Attributes:
        name: The model's name.
        version: The model's version.
        device: The instance's device by torch's name: "cpu" or "cuda:0".
        directory: The folder of the model's file.
        parameters: The strings in the configuration's `parameters`, and those of
            `shmserve serve FILE.py:CLASS --set NAME=VALUE`.
        lease: The function that `workspace` calls; the server sets it.
    """

    name: str
    version: str
    device: str
    directory: Path
    parameters: Mapping[str, str] = field(default_factory=dict)
    lease: Callable[[int], Lease] = field(default=_no_workspace, repr=False, compare=False)

    def workspace(self, byte_size: int) -> Lease:
        """Lease memory in `predict`, from a pool that the models on a device share.

            with self.context.workspace(1 << 30) as buffer:
                ...

        The block waits until the pool (`--workspace-byte-size`) has enough free memory. The buffer
        is not initialised, and must not be used after the block. Lease all memory of an execution
        at once, and call no other model meanwhile. In a coroutine use `async with`: other requests
        of the model continue while it waits.

        Args:
            byte_size: The size in bytes.

        Returns:
            A context manager that gives the buffer, a torch tensor of uint8, [byte_size].

        Raises:
            RuntimeError: No server runs the model.
            ShmserveError: The server has no pool (`--workspace-byte-size`), or a smaller one.
        """
        return self.lease(byte_size)

    @property
    def cancelled(self) -> bool:
        """Return whether the request that `predict` is answering was cancelled.

            for token in tokens:
                if self.context.cancelled:
                    return
                yield token

        The value is meaningful in a `predict` that yields. It is always False in an ordinary
        `predict`, and in other threads and tasks.
        """
        return IS_CANCELLED.get()()
