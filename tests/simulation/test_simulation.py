"""The simulation as a test: seeds that once failed, and as many others as fit into a minute."""

import itertools
import time

import pytest

from tests.simulation import mutants
from tests.simulation.lifecycle.run import LifecycleRun
from tests.simulation.seeds import SEEDS
from tests.simulation.simulation import Simulation

_PART_COUNT = 6
_PART_S = 8.0


def run(seed: int, kind: type[Simulation] | type[LifecycleRun] = Simulation) -> None:
    """Run a seed; a failure shows the last events."""
    simulation = kind(seed)
    try:
        simulation.run()
    except Exception as error:
        report = f"seed {seed}: {type(error).__name__}: {error}\n{simulation.world.report()}"
        raise AssertionError(report) from error


def test_recorded_failing_seeds_pass() -> None:
    for seed in SEEDS:
        run(seed)


@pytest.mark.parametrize("part", range(_PART_COUNT))
def test_no_rule_is_broken(part: int) -> None:
    start_s = time.monotonic()
    seed = part
    while time.monotonic() - start_s < _PART_S:
        run(seed)
        seed += _PART_COUNT


def test_no_rule_of_the_lifecycle_is_broken() -> None:
    start_s = time.monotonic()
    for seed in itertools.count():
        run(seed, LifecycleRun)
        if time.monotonic() - start_s > _PART_S:
            return


@pytest.mark.parametrize("kind", [Simulation, LifecycleRun])
def test_a_seed_gives_the_same_run(kind: type[Simulation] | type[LifecycleRun]) -> None:
    first_run, second_run = kind(7), kind(7)
    first_run.run()
    second_run.run()
    assert first_run.world.report() == second_run.world.report()
    assert first_run.world.events == second_run.world.events > 300


def test_no_mutant_is_stale() -> None:
    assert [mutant.name for mutant in mutants.read() if len(mutants.occurrences(mutant)) != 1] == []
