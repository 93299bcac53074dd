"""The imports of the supervisor, and the environment of worker processes."""

from pathlib import Path

from shmserve.supervisor.main import _worker_environment
from tests.support.servers import run_python


def test_idle_threads_of_openmp_do_not_spin_for_long() -> None:
    assert _worker_environment({}, Path("/run"))["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in _worker_environment({"OMP_WAIT_POLICY": "active"}, Path("/run"))


def test_the_operators_variables_take_precedence() -> None:
    environment = {"GOMP_SPINCOUNT": "7", "TORCHINDUCTOR_CACHE_DIR": "/cache"}
    assert environment.items() <= _worker_environment(environment, Path("/run")).items()


def test_the_supervisor_imports_nothing_that_only_its_children_need() -> None:
    """Each of these takes a tenth of a second, or more, before any child is started."""
    program = "import sys, shmserve.supervisor.main; print(*sys.modules)"
    result = run_python("-c", program, check=True)
    assert not {"torch", "numpy", "aiohttp", "uvloop"} & set(result.stdout.split())
