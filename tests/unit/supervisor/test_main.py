"""The environment that worker processes are started in."""

from __future__ import annotations

from shmserve.supervisor.main import _soon_asleep


def test_idle_threads_of_openmp_do_not_spin_for_long() -> None:
    assert _soon_asleep({}) == {"GOMP_SPINCOUNT": "1000"}
    assert _soon_asleep({"OMP_WAIT_POLICY": "active"}) == {}
