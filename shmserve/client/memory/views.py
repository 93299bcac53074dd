"""Arrays over shared memory, which keep it alive and raise Released after its release."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from shmserve.errors import Released
from shmserve.ipc.tensors.descriptors import Memory, Range, unpack_memory


def noop() -> None:
    """Do nothing."""


class RegisteredMemory:
    """Memory that is registered with a server; `memory` is the server's description of it."""

    memory: Memory | None = None

    def set_memory(self, memory: bytes) -> None:
        """Store the server's description of the memory, as packed in its response."""
        self.memory = unpack_memory(memory)

    def memory_range(self, offset: int, byte_size: int) -> Range:
        """Return the memory range of `byte_size` bytes at `offset`, as it is sent to the server."""
        assert self.memory is not None
        return Range(self.memory, offset, byte_size)


class MemoryLease:
    """A reference to memory, shared by all arrays over it; it ends with the last array.

    Attributes:
        on_end: Called when the last array is gone.
        released: Whether the program released the memory explicitly; the arrays then raise
            Released.
    """

    __slots__ = ("__weakref__", "on_end", "released")

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.on_end = on_end
        self.released = False

    def __del__(self) -> None:
        self.on_end()


class View(np.ndarray[Any, Any]):
    """An array over shared memory, which raises Released after the memory's release.

    Results of numpy functions are plain arrays. A plain view of the same memory keeps it alive.
    """

    _lease: MemoryLease | None

    @classmethod
    def from_memory(
        cls,
        memory: memoryview,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        lease: MemoryLease,
    ) -> View:
        """Return an array at `offset` of `memory`, which keeps the memory of `lease` alive."""
        view: View = np.ndarray.__new__(cls, shape, dtype, memory, offset)
        view._lease = lease
        return view

    def __array_finalize__(self, source: object) -> None:
        self._lease = getattr(source, "_lease", None)

    def plain(self) -> np.ndarray[Any, Any]:
        """Return the same memory as a plain array; raise Released after its release."""
        self.check()
        return np.ndarray.view(self, np.ndarray)

    def check(self) -> None:
        """Raise Released if the memory of this array was released."""
        if self._lease is not None and self._lease.released:
            raise Released("this memory was released; copy data that you need after the release")

    def __getitem__(self, key: Any) -> Any:
        return self.plain()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.plain()[key] = _plain(value)

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        if "where" in options:
            options["where"] = _plain(options["where"])
        if "out" not in options:
            return getattr(ufunc, method)(*map(_plain, inputs), **options)
        outs = options.pop("out")
        getattr(ufunc, method)(*map(_plain, inputs), out=tuple(map(_plain, outs)), **options)
        return outs[0] if len(outs) == 1 else outs

    def __array_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[Any],
        arguments: Iterable[Any],
        options: Mapping[str, Any],
    ) -> Any:
        keywords = {key: _deeply_plain(value) for key, value in options.items()}
        return function(*map(_deeply_plain, arguments), **keywords)

    def __repr__(self) -> str:
        return repr(self.plain())

    def __str__(self) -> str:
        return str(self.plain())

    def __dlpack__(self, **options: Any) -> Any:
        return self.plain().__dlpack__(**options)

    def copy(self, order: Any = "C") -> Any:
        """Return a copy as a plain array; raise Released after the memory's release."""
        return self.plain().copy(order)

    @property
    def flat(self) -> Any:
        """Return an iterator over the elements; raise Released after the memory's release."""
        return self.plain().flat

    def __copy__(self) -> Any:
        return self.plain().copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.plain().copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


def lease_of(array: object) -> MemoryLease | None:
    """Return the lease of a `View`, or of an array that is based on one; None for other arrays."""
    while isinstance(array, np.ndarray):
        if isinstance(array, View):
            return array._lease
        array = array.base
    return None


def _with_check(name: str) -> Callable[..., Any]:
    method = getattr(np.ndarray, name)

    @functools.wraps(method)
    def call(view: View, *arguments: Any, **options: Any) -> Any:
        view.check()
        return method(view, *arguments, **options)

    return call


# These methods are wrapped, because numpy implements them without __array_function__, and
# reductions would leak the array when __array_ufunc__ raises. Access by the buffer protocol or by
# address cannot be intercepted.
for _name in (
    *("__bool__", "__complex__", "__float__", "__format__", "__index__", "__int__"),
    *("argpartition", "astype", "byteswap", "choose", "compress", "conj", "conjugate", "diagonal"),
    *("dot", "dump", "dumps", "fill", "flatten", "getfield", "item", "partition", "put", "ravel"),
    *("repeat", "reshape", "searchsorted", "setfield", "sort", "squeeze", "swapaxes"),
    *("take", "tobytes", "tofile", "tolist", "transpose", "view"),
    *("all", "any", "argmax", "argmin", "argsort", "clip", "cumprod", "cumsum", "max", "mean"),
    *("min", "nonzero", "prod", "round", "std", "sum", "trace", "var"),
):
    setattr(View, _name, _with_check(_name))


def _plain(value: object) -> object:
    return value.plain() if isinstance(value, View) else value


def _deeply_plain(value: object) -> object:
    if isinstance(value, list | tuple):
        plain_items = map(_deeply_plain, value)
        return list(plain_items) if isinstance(value, list) else tuple(plain_items)
    return _plain(value)
