"""Large copies by several threads."""

import threading

import numpy as np
import pytest

from shmserve.workers.memory.outputs import Copier

MIB = 1024 * 1024


def count_helpers() -> int:
    return sum(thread.name == "copier" for thread in threading.enumerate())


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 64])
@pytest.mark.parametrize("byte_size", [1, MIB, 4 * MIB, 4 * MIB + 1, 7 * MIB + 13])
def test_every_byte_is_copied(threads: int, byte_size: int) -> None:
    source = np.random.default_rng(byte_size).integers(0, 256, byte_size, np.uint8)
    destination = np.zeros(byte_size, np.uint8)
    copier = Copier(threads)
    for _ in range(3):
        destination[:] = 0
        copier.copy(destination, source)
        assert np.array_equal(destination, source)


def test_shapes_and_strides() -> None:
    copier = Copier(2)
    source = np.arange(3 * MIB, dtype=np.float32).reshape(3, 1024, 1024)
    destination = np.zeros_like(source)
    copier.copy(destination, source)
    assert np.array_equal(destination, source)
    copier.copy(destination, source[:, ::-1])
    assert np.array_equal(destination, source[:, ::-1])
    strided = np.zeros((3, 1024, 2048), np.float32)[:, :, ::2]
    copier.copy(strided, source)
    assert np.array_equal(strided, source)


def test_threads_start_with_the_first_large_copy() -> None:
    threads_before = count_helpers()
    copier = Copier(3)
    small_array = np.zeros(MIB, np.uint8)
    copier.copy(small_array, small_array + 1)
    assert count_helpers() == threads_before
    large_array = np.zeros(5 * MIB, np.uint8)
    for _ in range(4):
        copier.copy(large_array, large_array + 1)
    assert count_helpers() == threads_before + 2


def test_nothing_of_a_copy_is_kept() -> None:
    import weakref

    class Array(np.ndarray):
        """An array that supports weak references."""

    copier = Copier(2)
    source = np.zeros(8 * MIB, np.uint8).view(Array)
    was_freed = threading.Event()
    weakref.finalize(source, was_freed.set)
    copier.copy(np.empty(8 * MIB, np.uint8), source)
    del source
    assert was_freed.wait(10.0)
