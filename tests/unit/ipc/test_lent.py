"""Lent memory: its readers, its release, and that tests detect memory that is never released."""

from collections.abc import Iterator
from typing import Any

import pytest

from shmserve.errors import Unavailable
from shmserve.ipc.memory.lent import (
    Block,
    CallbackToken,
    LentMemory,
    LentTokens,
    release_messages,
    unread_releases,
)
from shmserve.ipc.messages.inference import Release
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import Inferred, pack_inferred
from tests.support import tokens

READER, OTHER_READER = 7, 8


@pytest.fixture
def memory() -> Iterator[LentMemory]:
    lent_memory = LentMemory(1 << 16)
    yield lent_memory
    lent_memory.close()


def lend(memory: LentMemory, reader: int, byte_size: int = 100) -> Block:
    block = memory.allocate(byte_size)
    memory.lend(reader, block.memory_range, block)
    return block


def test_a_block_is_free_when_its_last_user_releases_it(memory: LentMemory) -> None:
    block = memory.write(b"x" * 100)
    block.acquire()
    block.release()
    assert memory.used_bytes >= 100
    block.release()
    assert memory.used_bytes == 0


def test_only_its_reader_releases_a_block(memory: LentMemory) -> None:
    memory_range = lend(memory, READER).memory_range
    memory_id, offset = memory_range.memory.id, memory_range.offset
    assert not memory.release(OTHER_READER, memory_id, [offset])
    assert not memory.release(READER, memory_id + 1, [offset])
    assert not memory.release(READER, memory_id, [offset + 64]) and memory.used_bytes
    assert memory.release(READER, memory_id, [offset, offset])
    assert (memory.used_bytes, len(memory._lent_tokens)) == (0, 0)
    assert not memory.release(READER, memory_id, [offset])


def test_all_blocks_of_an_exited_reader_are_freed(memory: LentMemory) -> None:
    for reader in (READER, OTHER_READER, READER):
        lend(memory, reader)
    memory.release_all(READER)
    assert len(memory._lent_tokens) == 1
    memory.release_all(OTHER_READER)
    memory.release_all(OTHER_READER)
    assert memory.used_bytes == 0


def test_a_block_lent_twice_is_returned_twice(memory: LentMemory) -> None:
    block = lend(memory, READER)
    block.acquire()
    memory.lend(READER, block.memory_range, block)
    for is_used in (True, False):
        memory.release(READER, block.memory_range.memory.id, [block.memory_range.offset])
        assert bool(memory.used_bytes) == is_used


def test_full_memory_is_an_error(memory: LentMemory) -> None:
    blocks = [memory.allocate(1 << 15), memory.allocate(1 << 15)]
    with pytest.raises(Unavailable, match="server memory for tensors is full"):
        memory.allocate(1)
    for block in blocks:
        block.release()
    memory.allocate(1 << 16).release()


def test_a_token_collected_before_its_release_is_reported() -> None:
    lent_tokens: LentTokens[int] = LentTokens()
    lent_tokens.lend(READER, 0, CallbackToken(lambda: None))
    lent_tokens._tokens.clear()  # discard the block without a release
    assert tokens.LOST_TOKENS == []
    source = compile("def drop(make): make()", tokens.OWN_FOLDERS[0] + "somewhere.py", "exec")
    namespace: dict[str, object] = {}
    exec(source, namespace)
    namespace["drop"](lambda: CallbackToken(lambda: None))  # type: ignore[operator]
    assert (
        len(tokens.LOST_TOKENS) == 1
        and "CallbackToken was dropped while used" in tokens.LOST_TOKENS.pop()
    )


def memory_range(id_: int, pid: int, offset: int, sealed: bool = True, cuda: bool = False) -> Range:
    handle = CudaHandle(b"h" * 64, 0) if cuda else None
    return Range(Memory(id_, pid, 3, 4, 1 << 20, sealed, cuda=handle), offset, 8)


def test_releases_name_each_process_once_and_no_client() -> None:
    parts = {
        "a": memory_range(1, 10, 0),
        "b": memory_range(2, 11, 64),
        "c": memory_range(1, 10, 128),
        "region": memory_range(3, 12, 0, sealed=False),
        "device": memory_range(4, 0, 0, cuda=True),
        "own": memory_range(5, 13, 0),
    }
    outputs = [TensorRef(name, "UINT8", (8,), data) for name, data in parts.items()]
    outputs.append(TensorRef("inline", "UINT8", (1,), b"x"))
    assert release_messages(parts.values(), {5}) == [
        Release(10, [0, 128]),
        Release(11, [64]),
    ]
    _, data = pack_inferred(Inferred(tuple(outputs)))
    assert unread_releases(data) == [Release(10, [0, 128]), Release(11, [64]), Release(13, [0])]


@pytest.mark.parametrize("data", [[], [b"x"], [None], [[b"", 0, 0]], [[b"\xc1", 0, 0]], [7]])
def test_data_without_memory_ranges_release_nothing(data: list[Any]) -> None:
    assert unread_releases(data) == []
