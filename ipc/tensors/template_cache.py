"""The template cache: packed requests and responses that differ from earlier ones in tensor bytes
alone are not unpacked again; and the bounded cache under it.

Programs send, and models return, the same template again and again: the same names, types and
shapes with other numbers, or the very same bytes where the numbers are in shared memory. What
follows from the template alone is then known without unpacking.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from struct import Struct
from typing import Generic, NamedTuple, TypeVar

from shmserve.ipc.tensors.inference import Inference, Inferred, PackedTemplate

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
U = TypeVar("U", Inference, Inferred)

_MOST_KNOWN = 256
LONGEST_KNOWN = 4096  # bytes of a packed request or response


class BoundedCache(Generic[K, V]):
    """At most `most` values by key. When it is full all are forgotten, which costs least; with
    `on_evict`, which hears of those that go, the oldest is.

    Threads may use it at the same time.
    """

    __slots__ = ("_known", "_most", "_noticed", "_on_evict", "find")

    def __init__(self, most: int, on_evict: Callable[[V], None] | None = None) -> None:
        self._known: dict[K, V] = {}
        self._noticed: set[K] = set()
        self._most = most
        self._on_evict = on_evict
        # The value of a key, or None. Requests on their way look often: no call is between.
        self.find: Callable[[K], V | None] = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def notice(self, key: K) -> bool:
        """Something with this key is here; returns whether it came before, so that nothing is
        worked out for one use."""
        if key in self._known or key in self._noticed:
            return True
        if len(self._noticed) >= self._most:
            self._noticed.clear()
        self._noticed.add(key)
        return False

    def remember(self, key: K, value: V) -> None:
        """Keep a value, in the place of another."""
        self._make_room(key)
        self._known[key] = value

    def share(self, key: K, value: V) -> V:
        """Keep a value, unless another thread has made one meanwhile; returns the one that is."""
        self._make_room(key)
        return self._known.setdefault(key, value)

    def forget(self, key: K) -> None:
        """Its value is no good any more."""
        self._known.pop(key, None)

    def clear(self) -> None:
        """Forget all, which `on_evict` hears of."""
        if self._on_evict is None:
            self._known.clear()
            return
        for key in list(self._known):
            self._evict(key)

    def _make_room(self, key: K) -> None:
        if len(self._known) < self._most or key in self._known:
            return
        if self._on_evict is None:
            self._known.clear()
            return
        known = list(self._known)
        for oldest in known[: len(known) - self._most + 1]:
            self._evict(oldest)

    def _evict(self, key: K) -> None:
        value = self._known.pop(key, None)
        if value is not None and self._on_evict is not None:
            self._on_evict(value)


class _Cut(NamedTuple, Generic[T]):
    """The layout of templates of one size, pieces and inline tensors by turns, and what they mean,
    by their pieces: places of memory that is used again come by turns."""

    layout: Struct
    meanings: dict[tuple[bytes, ...], T]


class TemplateCache(Generic[T]):
    """Templates of recent packed requests, or responses, and what they mean: `most` with inline
    tensors, once they come again, and as many without any; of up to `longest` bytes."""

    __slots__ = ("_cuts", "_learnt", "_longest", "_most", "_whole")

    def __init__(self, most: int = _MOST_KNOWN, longest: int = LONGEST_KNOWN) -> None:
        self._cuts: BoundedCache[int, _Cut[T]] = BoundedCache(most)  # by the size of what is packed
        self._learnt = 0  # meanings in there, at most
        self._most = most
        self._whole: BoundedCache[bytes, tuple[T, tuple[bytes, ...]]] = BoundedCache(most)
        self._longest = longest

    def find(self, packed: bytes) -> tuple[T, tuple[bytes, ...]] | None:
        """The meaning of the template of `packed`, and the bytes of its inline tensors in order."""
        size = len(packed)
        cut = self._cuts.find(size)
        if cut is not None:
            parts = cut.layout.unpack(packed)
            pieces = parts[::2]
            if pieces in cut.meanings:
                return cut.meanings[pieces], parts[1::2]
        return self._whole.find(packed) if size <= self._longest else None

    def learn(self, packed: bytes, unpacked: Inference | Inferred, meaning: T) -> None:
        """Enter the template of `packed`, which was not known."""
        if len(packed) > self._longest:
            return
        tensors = unpacked.inputs if isinstance(unpacked, Inference) else unpacked.outputs
        datas = [data for ref in tensors if type(data := ref.data) is bytes]
        if not datas:
            # Who uses memory again sends the very same bytes.
            self._whole.remember(packed, (meaning, ()))
        elif self._cuts.notice(len(packed)):
            pieces = PackedTemplate(unpacked).pieces
            parts = [*chain.from_iterable(zip(pieces, datas, strict=False)), pieces[-1]]
            if b"".join(parts) == packed:  # else it was packed by someone who packs in another way
                layout = Struct("<" + "".join([f"{len(part)}s" for part in parts]))
                self._cut(len(packed), layout).meanings[tuple(pieces)] = meaning

    def _cut(self, size: int, layout: Struct) -> _Cut[T]:
        """Where one more meaning is kept: with others of its layout."""
        if self._learnt >= self._most:
            self._cuts.clear()
            self._learnt = 0
        self._learnt += 1
        cut = self._cuts.find(size)
        if cut is None or cut.layout.format != layout.format:
            cut = _Cut(layout, {})
            self._cuts.remember(size, cut)
        return cut


class UnpackCache(Generic[U]):
    """Unpacks requests, or responses, those alone that are unlike the ones before by more than the
    bytes of their inline tensors. Who gets one may share it, and changes nothing."""

    __slots__ = ("_templates", "_unpack")

    def __init__(self, unpack: Callable[[bytes], U]) -> None:
        self._templates: TemplateCache[U] = TemplateCache()
        self._unpack: Callable[[bytes], U] = unpack

    def unpack(self, packed: bytes) -> U:
        """What this says. Raises MalformedMessage."""
        known = self._templates.find(packed)
        if known is None:
            unpacked = self._unpack(packed)
            self._templates.learn(packed, unpacked, unpacked)
            return unpacked
        unpacked, datas = known
        return unpacked.filled(datas) if datas else unpacked
