"""The environment of worker processes."""

from pathlib import Path

from shmserve.supervisor.main import _worker_environment


def test_idle_threads_of_openmp_do_not_spin_for_long() -> None:
    assert _worker_environment({}, Path("/run"))["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in _worker_environment({"OMP_WAIT_POLICY": "active"}, Path("/run"))


def test_the_operators_variables_take_precedence() -> None:
    environment = {"GOMP_SPINCOUNT": "7", "TORCHINDUCTOR_CACHE_DIR": "/cache"}
    assert environment.items() <= _worker_environment(environment, Path("/run")).items()
