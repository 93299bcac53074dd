"""`python -m tests.simulation [--lifecycle] [--seeds N] [--first SEED] [--seconds S]`: run seeds.

Simulates the schedulers, or with `--lifecycle` the lifecycle of models. For the first seed that
breaks a rule, the last 200 events are printed.
"""

import argparse
import logging
import sys
import time
from collections import Counter

from tests.simulation.lifecycle.run import LifecycleRun
from tests.simulation.simulation import Simulation
from tests.simulation.world import TRACED_EVENTS


def main() -> int:
    """Run the simulation; return 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="of CPU time; 0: no limit")
    parser.add_argument("--go-on", action="store_true", help="count failing seeds, show none")
    parser.add_argument("--lifecycle", action="store_true", help="of models, and no requests")
    parser.add_argument("--traced", type=int, default=TRACED_EVENTS, help="how many events to show")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    start_s, requests, failures = time.monotonic(), 0, 0
    faults: Counter[str] = Counter()
    seed = arguments.first
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        simulation: Simulation | LifecycleRun
        if arguments.lifecycle:
            simulation = LifecycleRun(seed, traced=arguments.traced)
        else:
            simulation = Simulation(seed, traced=arguments.traced)
        try:
            simulation.run()
        except Exception as error:
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {error}")
            if not arguments.go_on:
                print(simulation.world.report())
                print(f"seed {seed}: {type(error).__name__}: {error}")
                if not isinstance(error, AssertionError):
                    raise
                return 1
        requests += simulation.request_count
        faults += simulation.world.faults
        if arguments.seconds and time.process_time() > arguments.seconds:
            break
    seconds = time.monotonic() - start_s
    kind = "orders" if arguments.lifecycle else "requests"
    print(
        f"{seed + 1 - arguments.first} seeds, {requests} {kind}, {sum(faults.values())} faults "
        f"in {seconds:.1f} s ({requests / seconds:.0f} {kind}/s), {failures} failed: {dict(faults)}"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
