"""The response cache of one model version: identical requests are not executed again.

ResponseCache   lookups and insertions, and the memory that large tensors are read from
LruCache        entries within a limit of bytes; the least recently used are evicted
cache_key       the digest over all inputs of the model, equal for equivalent requests

Only bytes that no client can change are hashed and stored: those in the message, and those in
memory of the server's processes (a gateway's for the body of a request, a worker's for outputs). A
request with an input or an output in a client's region, or on a device, bypasses the cache. No
scheduler reads such memory, and a client's digest of its content cannot be trusted.

For each hit, a large response is copied into an arena from which the reader releases it. A reader
that modifies its copy does not affect the cache.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgpack

from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.memory.lent import Block, LentMemory
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.messages.supervision import CacheStart
from shmserve.ipc.tensors.descriptors import Range, pack_range, unpack_range
from shmserve.ipc.tensors.schemas import INLINE_LIMIT, Packed, RequestSchema, Schemas
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.scheduler.requests.scheduled import EMPTY_RESPONSE, Lookup

logger = logging.getLogger(__name__)

_DIGEST_SIZE = 32
# The approximate overhead of an entry and of a tensor, in bytes.
_ENTRY_OVERHEAD = 512
_TENSOR_OVERHEAD = 256

T = TypeVar("T")


class _Entry(NamedTuple):
    """A cached response: its schema and the bytes of each tensor.

    `is_inline` is true if all tensors are sent inside the message.
    """

    schema: bytes
    data: list[bytes]
    is_inline: bool  # whether all tensors are sent in messages


class _SchemaKey(NamedTuple):
    """The part of a cache key that a request's schema determines.

    Attributes:
        input_order: The indices of the inputs, sorted by the inputs' names.
    """

    prefix: bytes  # packed names, datatypes, shapes, parameters and requested outputs
    input_order: list[int]  # indices of the inputs, sorted by name


@dataclass(eq=False)
class ResponseCache:
    """The cached responses of one model version.

    `_start` contains the cache's capacity and the pid of the process that holds clients' memory.
    Large responses are copied to `lent_memory` for each reader.
    """

    _model: str
    _version: str
    _start: CacheStart
    lent_memory: LentMemory
    _clock: Callable[[], int] = time.monotonic_ns
    _mappings: Mappings = field(default_factory=Mappings)
    _lent_bytes: int = 0
    _too_large_count: int = 0

    def __post_init__(self) -> None:
        self._entries: LruCache[_Entry] = LruCache(self._start.byte_size)
        derive = partial(derive_schema_key, self._model, self._version)
        self._schema_keys: Schemas[_SchemaKey] = Schemas(derive)

    def look_up(self, submit: Submit) -> Lookup | None:
        """Return the result of a lookup, or None if the request bypasses the cache.

        The caller must lend or cancel the result.
        """
        began_ns = self._clock()
        copies: list[Block] = []
        try:
            schema_key = self._schema_keys[submit.schema]
            if not schema_key.prefix:
                return None
            sequence = (submit.correlation_id, submit.correlation_text, submit.flags)
            contents = [self._tensor_bytes(submit.data[index]) for index in schema_key.input_order]
            key = cache_key(schema_key.prefix, sequence, contents)
            entry = self._entries.find(key)
            if entry is None:
                return Lookup(key, EMPTY_RESPONSE, self._clock() - began_ns, copies)
            data = entry.data if entry.is_inline else self._copy_to_lent(entry.data, copies)
        except (MalformedMessage, ShmserveError, LookupError):
            return None
        return Lookup(b"", (entry.schema, data), self._clock() - began_ns, copies)

    def _tensor_bytes(self, tensor: Any) -> Any:
        """Return the bytes of a tensor that is inline or in a memory range.

        Raises:
            MalformedMessage: The memory range cannot be decoded.
            Unavailable: A client may change the bytes, or the memory is gone.
        """
        if type(tensor) is bytes:
            return tensor
        memory_range = unpack_range(tensor)
        memory = memory_range.memory
        is_client_memory = memory.pid == self._start.supervisor_pid
        if memory.cuda is not None or memory.copied or not memory.sealed or is_client_memory:
            raise Unavailable("the response cache stores no tensors in device or client memory")
        return self._mappings.view(memory_range)

    def insert(self, key: bytes, response: Packed) -> int:
        """Store the response to a request that missed; return the duration in ns.

        A response with tensors in memory that schedulers do not read is not stored.
        """
        began_ns = self._clock()
        schema, data = response
        try:
            contents = [bytes(self._tensor_bytes(tensor)) for tensor in data]
        except (MalformedMessage, ShmserveError, ValueError, TypeError):
            return self._clock() - began_ns  # the response is in memory that schedulers do not read
        is_inline = all(type(tensor) is bytes for tensor in data)
        entry = _Entry(schema, contents, is_inline)
        byte_size = _ENTRY_OVERHEAD + len(schema) + sum([len(tensor) for tensor in contents])
        if not is_inline:
            byte_size += _TENSOR_OVERHEAD * len(contents)
        if not self._entries.insert(key, entry, byte_size):
            self._log_too_large(key, byte_size)
        return self._clock() - began_ns

    def _log_too_large(self, key: bytes, byte_size: int) -> None:
        self._too_large_count += 1
        # Log only the 1st, 2nd, 4th, 8th, ... refusal.
        if self._too_large_count & (self._too_large_count - 1) == 0:
            logger.warning(
                "Failed to insert key %s: a response has %d bytes, but the share of model '%s' in "
                "the response cache is %d bytes (%d responses were too large so far)",
                *(
                    key.hex()[:16],
                    byte_size,
                    self._model,
                    self._entries.bound,
                    self._too_large_count,
                ),
            )

    # --- memory -----------------------------------------------------------------------------------

    def _copy_to_lent(self, contents: list[bytes], copies: list[Block]) -> list[Any]:
        """Copy a large response into memory that can be lent, and return its data.

        Args:
            contents: The bytes of each tensor.
            copies: A list to which the new blocks are appended.

        Raises:
            ShmserveError: The response does not fit.
        """
        response_data: list[Any] = []
        free_inline_bytes = INLINE_LIMIT
        try:
            for content in contents:
                if len(content) <= free_inline_bytes:
                    free_inline_bytes -= len(content)
                    response_data.append(content)
                    continue
                copy = self.lent_memory.write(content, self.free)
                copies.append(copy)
                self._lent_bytes += len(content)
                response_data.append(pack_range(copy.memory_range))
        except ShmserveError:
            for copy in copies:
                copy.release()
            raise
        return response_data

    def lend(self, reader_pid: int, lookup: Lookup) -> None:
        """Lend the copies of a response to a process until it releases them."""
        for copy in lookup.copies:
            self.lent_memory.lend(reader_pid, copy.memory_range, copy)

    def free(self, memory_range: Range) -> None:
        """Free a copy that every reader has released."""
        self._lent_bytes -= memory_range.byte_size
        self.lent_memory.free(memory_range)

    def process_exited(self, pid: int) -> None:
        """Release the memory of a process that has exited, and the copies that it was reading."""
        self._mappings.unmap_process(pid)
        self.lent_memory.release_all(pid)

    def clear(self) -> None:
        """Remove all responses, because they may no longer be valid."""
        self._entries.clear()

    # --- size of the cache ------------------------------------------------------------------------

    def resize(self, byte_size: int) -> None:
        """Change the cache's capacity: its share of the server's cache in bytes."""
        self._entries.resize(byte_size)

    def gauges(self) -> dict[str, int]:
        """Return the current sizes and counts by name: the member `cache` of a report."""
        return {
            "bytes": self._entries.used_bytes,
            "bound": self._entries.bound,
            "entries": len(self._entries),
            "evicted": self._entries.evicted_count,
            "lent_bytes": self._lent_bytes,
        }


class LruCache(Generic[T]):
    """A cache of values by key, with a total size of at most `bound` bytes.

    The values that were used least recently are evicted.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used_bytes = 0
        self.evicted_count = 0
        self._entries: OrderedDict[bytes, tuple[int, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> T | None:
        """Return the value of a key, which becomes the most recently used one, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def insert(self, key: bytes, value: T, byte_size: int) -> bool:
        """Store a value; evict other values until it fits.

        Return False, without a change, if the value is larger than the cache.
        """
        if byte_size > self.bound:
            return False
        replaced_entry = self._entries.pop(key, None)
        if replaced_entry is not None:
            self.used_bytes -= replaced_entry[0]
        self._evict(self.bound - byte_size)
        self._entries[key] = byte_size, value
        self.used_bytes += byte_size
        return True

    def clear(self) -> None:
        """Remove all values."""
        self._entries.clear()
        self.used_bytes = 0

    def resize(self, bound: int) -> None:
        """Change the bound, and evict values until the cache fits."""
        self.bound = bound
        self._evict(bound)

    def _evict(self, bound: int) -> None:
        while self.used_bytes > bound:
            byte_size, _ = self._entries.popitem(last=False)[1]
            self.used_bytes -= byte_size
            self.evicted_count += 1


def derive_schema_key(model: str, version: str, packed_schema: bytes) -> _SchemaKey:
    """Return the part of the cache key that all requests of one schema have in common.

    The prefix is empty if the requests have output ranges, because they then bypass the cache.

    Triton's key has 64 bits and covers names and bytes only, so that other shapes with the same
    bytes, or other outputs, collide. This key covers the model and its version; the name, datatype,
    shape and bytes of each input, in any order; the parameters; the correlation id; and the
    requested outputs in order. It does not cover the request's id, priority, timeout and deadline.
    """
    schema = RequestSchema(packed_schema)
    if schema.data_count > len(schema.inputs):
        return _SchemaKey(b"", [])
    input_order = sorted(range(len(schema.inputs)), key=lambda index: schema.inputs[index].name)
    inputs = [schema.inputs[index][:3] for index in input_order]
    outputs = [output.name for output in schema.outputs]
    key_parts = (model, version, inputs, sorted(schema.parameters.items()), outputs)
    return _SchemaKey(msgpack.packb(key_parts), input_order)


def cache_key(prefix: bytes, sequence: tuple[int, str, int], contents: list[Any]) -> bytes:
    """Return the cache key of a request: BLAKE2b (RFC 7693) with 256 bits.

    Args:
        prefix: The part determined by its schema; see `derive_schema_key`.
        sequence: The correlation id, as a number and as a text, and the flags.
        contents: The inputs' bytes, sorted by name. Their sizes make the encoding unambiguous.
    """
    packed_sizes = msgpack.packb((sequence, [len(content) for content in contents]))
    digest = hashlib.blake2b(prefix, digest_size=_DIGEST_SIZE)
    digest.update(packed_sizes)
    for content in contents:
        digest.update(content)
    return digest.digest()
