"""The environment in which large copies go past the caches."""

from shmserve.ipc.processes import LARGE_COPY, past_the_caches
from shmserve.workers.memory import copying

_SETTING = "glibc.cpu.x86_non_temporal_threshold=0x200000"


def test_what_is_there_stays() -> None:
    before = {"HOME": "/root"}
    assert past_the_caches(before) == {"HOME": "/root", "GLIBC_TUNABLES": _SETTING}
    assert before == {"HOME": "/root"}


def test_other_tunables_stay() -> None:
    before = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert past_the_caches(before)["GLIBC_TUNABLES"] == f"glibc.malloc.arena_max=1:{_SETTING}"


def test_an_operators_own_threshold_stays() -> None:
    before = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x1000000"}
    assert past_the_caches(before) == before


def test_the_pieces_of_a_large_copy_are_large() -> None:
    assert copying._PIECE >= LARGE_COPY
