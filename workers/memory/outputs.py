"""Output memory: arena blocks that their readers free, and parallel copies of large outputs.

One core copies slower than the memory allows. `Copier` therefore cuts a large copy into pieces,
which the calling thread and its helper threads take in turn. If no core is free for the helpers,
only their wake-up is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue

import numpy as np

from shmserve.errors import Unavailable
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.cuda_ipc import address_of
from shmserve.ipc.memory.lent import LentTokens, Token
from shmserve.ipc.processes import LARGE_COPY
from shmserve.ipc.tensors.descriptors import Range
from shmserve.workers.batch.backend_request import Array


class _OutputBlock(Token):
    """A block of the arena, allocated for the process that will read the block."""

    __slots__ = ("_memory", "memory_range", "reader")

    def __init__(self, memory: OutputMemory, memory_range: Range, reader: int) -> None:
        self._reference_count = 1
        self._memory = memory
        self.memory_range = memory_range
        self.reader = reader

    def _free(self) -> None:
        self._memory.free(self)


class OutputMemory:
    """Blocks of the worker's arena, each lent to the process that reads and releases the block.

    A reader may hold a block until it exits. Its release arrives by way of the scheduler that
    serves the model then. Blocks of responses that no scheduler received are freed immediately.

    A local client is not trusted to release its blocks, so it may hold at most as many bytes as are
    free. One client that releases nothing holds half of the arena at most, n clients n/(n + 1). A
    client without a block may allocate an output of any size. See "dynamic thresholds", Choudhury
    and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998.

    Attributes:
        unsent: The blocks of responses that were not sent yet, by offset.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lent_tokens: LentTokens[int] = LentTokens()
        self.unsent: dict[int, _OutputBlock] = {}  # blocks of unsent responses, by offset
        self._lent_bytes: dict[int, int] = {}  # by reader, including blocks that were not sent yet
        # Blocks that a model computes in, by address.
        self._reserved_outputs: dict[int, _OutputBlock] = {}
        self._exited_readers: set[int] = set()  # readers whose exit the scheduler has not confirmed

    @property
    def id(self) -> int:
        """Return the id of the arena's memory."""
        return self._arena.memory.id

    def __len__(self) -> int:
        return len(self._lent_tokens) + len(self.unsent)

    def allocate(self, reader: int, byte_size: int) -> tuple[Range, memoryview]:
        """Allocate a block for a process; return its range and its bytes.

        Raises:
            Unavailable: The arena is full, or the share of a local client is used up.
            InvalidArgument: The arena is smaller than the block.
        """
        lent_bytes = self._lent_bytes.get(reader, 0)
        if lent_bytes and reader >= FIRST_LOCAL_CLIENT:
            self._check_share(lent_bytes, byte_size)
        memory_range = self._arena.allocate(byte_size)
        self.unsent[memory_range.offset] = _OutputBlock(self, memory_range, reader)
        self._lent_bytes[reader] = lent_bytes + byte_size
        return memory_range, self._arena.view(memory_range)

    def reserve(self, reader: int, byte_size: int) -> memoryview:
        """Allocate a block for an output that the model computes in place, and return its bytes.

        `claim` returns the block. A block that is not claimed is freed when the batch is sent.

        Raises:
            ShmserveError: As `allocate`.
        """
        memory_range, view = self.allocate(reader, byte_size)
        self._reserved_outputs[address_of(view)] = self.unsent[memory_range.offset]
        return view

    def claim(self, reader: int, address: int, byte_size: int) -> Range | None:
        """Return the reserved block at the address of an output, or None if there is none."""
        block = self._reserved_outputs.get(address)
        if block is None or block.memory_range.byte_size != byte_size or block.reader != reader:
            return None
        if self.unsent.get(block.memory_range.offset) is not block:
            return None
        return self._reserved_outputs.pop(address).memory_range

    def _check_share(self, lent_bytes: int, byte_size: int) -> None:
        free_bytes = self._arena.memory.byte_size - self._arena.used_bytes
        if lent_bytes + byte_size > free_bytes - byte_size:
            raise Unavailable(
                f"server memory for tensors: {byte_size} bytes are needed, and {free_bytes} are "
                f"free; this client holds {lent_bytes}, and must leave as many free (release "
                "responses, or raise --arena-byte-size)"
            )

    def release(self, reader: int, offsets: list[int]) -> None:
        """Free blocks that their reader has released; blocks not lent to the reader are ignored."""
        self._lent_tokens.release(reader, offsets)

    def record_exit(self, reader: int) -> None:
        """Record that a process has exited; its blocks are kept until `free_all`.

        The scheduler may still copy the blocks into the response cache, and sends `ReaderExited`
        after that. `free_exited` frees them if the scheduler itself exits.
        """
        if reader in self._lent_bytes:
            self._exited_readers.add(reader)

    def free_exited(self) -> None:
        """Free the blocks of all exited readers without waiting for `ReaderExited`.

        This is called when the scheduler has exited, which would have sent the message.
        """
        for reader in list(self._exited_readers):
            self.free_all(reader)

    def free_all(self, reader: int) -> None:
        """Free every block of a process that has exited."""
        self._exited_readers.discard(reader)
        self._lent_tokens.release_all(reader)
        self.free_unused([offset for offset, item in self.unsent.items() if item.reader == reader])

    def free_unused(self, offsets: Iterable[int]) -> None:
        """Free blocks that were allocated for responses and are not used for them."""
        for offset in offsets:
            output = self.unsent.pop(offset, None)
            if output is not None:
                output.release()

    def free(self, block: _OutputBlock) -> None:
        """Free a block that has no user any more."""
        reader, memory_range = block.reader, block.memory_range
        lent_bytes = self._lent_bytes[reader] - memory_range.byte_size
        if lent_bytes:
            self._lent_bytes[reader] = lent_bytes
        else:
            del self._lent_bytes[reader]
        self._arena.free(memory_range.offset)

    def mark_sent(self) -> None:
        """Lend blocks to their readers after the responses were sent, and free unclaimed blocks."""
        for output in self._reserved_outputs.values():
            if self.unsent.get(output.memory_range.offset) is output:
                self.free_unused((output.memory_range.offset,))
        self._reserved_outputs.clear()
        for offset, output in self.unsent.items():
            self._lent_tokens.lend(output.reader, offset, output)
        self.unsent.clear()

    def free_unsent(self) -> None:
        """Free the blocks of responses that could not be sent."""
        self._reserved_outputs.clear()
        self.free_unused(list(self.unsent))


# In bytes; for smaller copies a wake-up costs as much as it saves.
_MIN_PARALLEL_BYTES = 4 * 1024 * 1024
_PIECE_BYTES = LARGE_COPY  # bytes; smaller pieces would be copied through the caches
_MAX_HELPERS = 3


class _CopyJob:
    """A large copy that is cut into pieces.

    The iterator `piece_numbers` assigns each piece to one thread.
    """

    __slots__ = ("_lock", "_pieces_left", "_source", "_target", "finished_lock", "piece_numbers")

    def __init__(self, target: Array, source: Array) -> None:
        self._target = target
        self._source = source
        self._pieces_left = -(-len(target) // _PIECE_BYTES)
        self._lock = threading.Lock()
        self.finished_lock = threading.Lock()
        self.finished_lock.acquire()
        self.piece_numbers: Iterator[int] = iter(range(self._pieces_left))

    def copy_pieces(self) -> None:
        """Copy pieces until all pieces are assigned."""
        for number in self.piece_numbers:  # atomic, because the iterator is implemented in C
            piece = slice(number * _PIECE_BYTES, (number + 1) * _PIECE_BYTES)
            np.copyto(self._target[piece], self._source[piece])
            with self._lock:
                self._pieces_left -= 1
                if not self._pieces_left:
                    self.finished_lock.release()


class Copier:
    """A copier of arrays that uses up to `threads` threads, including the caller's."""

    def __init__(self, threads: int) -> None:
        self._helper_count = max(0, min(threads - 1, _MAX_HELPERS))
        # Queue of the helper threads, created by the first large copy.
        self._jobs: SimpleQueue[_CopyJob] | None = None

    def copy(self, target: Array, source: Array) -> None:
        """Execute `target[...] = source` for arrays of one shape and type that do not overlap."""
        is_flat = source.flags.c_contiguous and target.flags.c_contiguous
        if target.nbytes < _MIN_PARALLEL_BYTES or not self._helper_count or not is_flat:
            target[...] = source
            return
        if self._jobs is None:
            self._jobs = self._start_helpers()
        job = _CopyJob(_as_bytes(target), _as_bytes(source))
        for _ in range(self._helper_count):
            self._jobs.put(job)
        job.copy_pieces()
        job.finished_lock.acquire()

    def _start_helpers(self) -> SimpleQueue[_CopyJob]:
        jobs: SimpleQueue[_CopyJob] = SimpleQueue()
        for _ in range(self._helper_count):
            threading.Thread(target=_run_helper, args=(jobs,), name="copier", daemon=True).start()
        return jobs


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _run_helper(jobs: SimpleQueue[_CopyJob]) -> None:
    while True:
        job: _CopyJob | None = jobs.get()
        assert job is not None
        job.copy_pieces()
        job = None
