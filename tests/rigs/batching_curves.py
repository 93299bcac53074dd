"""Models whose batches take any time as a function of their size, each under three loads: what the
adaptive batcher makes of them, beside the best that a fixed size and delay can.

`python -m tests.rigs.batching_curves [--seeds FIRST END] [--requests N]` compares them on the named
curves and on those drawn from the seeds.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shmserve.scheduler.batchers import Batcher
from shmserve.scheduler.batchers.adaptive import AdaptiveBatcher
from shmserve.scheduler.settings import Batching
from tests.rigs.batching_simulation import (
    MS,
    Arriving,
    Run,
    Simulation,
    exponential_pauses,
    fixed_run,
)

MAX_BATCH_SIZE = 32
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
DELAYS_MS = (0, 2, 5, 10, 20)


@dataclass(frozen=True)
class Curve:
    """`ms[size - 1]` on average. `jitter`: the most parts that come on top; `slow` of the batches
    take `slower` times as long; the times become `drift` times as long."""

    name: str
    ms: tuple[float, ...]
    jitter: float = 0.0
    slow: float = 0.0
    slower: float = 1.0
    drift: float = 1.0

    def timer(self, seed: int, length_s: float) -> Callable[[int, int], float]:
        """Return execution times by batch size and time; a drift changes the middle half."""
        rng = random.Random(seed)
        base = [ms * MS for ms in self.ms]

        def time_ns(size: int, now_ns: int) -> float:
            ns = base[size - 1] * (1 + self.jitter * rng.random() ** 2)
            if self.slow and rng.random() < self.slow:
                ns *= self.slower
            if self.drift != 1.0:
                part = 2 * now_ns / 1e9 / length_s - 0.5
                ns *= self.drift ** min(max(part, 0.0), 1.0)
            return ns

        return time_ns

    @property
    def most_per_second(self) -> float:
        """Return the highest rate that one instance can sustain."""
        factor = (1 + self.jitter / 3) * (1 + self.slow * (self.slower - 1)) * max(self.drift, 1.0)
        return max(size / ms for size, ms in enumerate(self.ms, 1)) * 1000 / factor


def scale_curve(ms: Callable[[int], float]) -> tuple[float, ...]:
    """Return a curve whose execution times of all sizes are scaled."""
    return tuple(ms(size) for size in range(1, MAX_BATCH_SIZE + 1))


def step(limit_size: int, low_ms: float, high_ms: float, each_ms: float = 0.0) -> tuple[float, ...]:
    """Return a curve with `low_ms` up to `limit_size`, `high_ms` above, and `each_ms` per row."""
    return scale_curve(lambda size: (low_ms if size <= limit_size else high_ms) + each_ms * size)


NAMED_CURVES = (
    Curve("step at 4", step(4, 15, 60), 0.1),
    Curve("step at 8", step(8, 20, 100)),
    Curve("step at 12", step(12, 25, 90), 0.1),
    Curve(
        "two steps", scale_curve(lambda size: 10 if size <= 4 else 25 if size <= 16 else 90), 0.1
    ),
    Curve("plateau", scale_curve(lambda size: 5 + 3 * min(size, 8)), 0.1),
    Curve("falling", scale_curve(lambda size: 45 - size), 0.1),
    Curve("fallen", step(7, 40, 15), 0.1),
    Curve("tiles of 8", scale_curve(lambda size: 4 + 12 * ((size + 7) // 8)), 0.1),
    Curve("line", scale_curve(lambda size: 10 + 0.5 * size), 0.3),
    Curve("growing faster", scale_curve(lambda size: 6 + 0.12 * size**2), 0.1),
    Curve("slower", step(8, 15, 70), 0.1, drift=2.0),
    Curve("faster", scale_curve(lambda size: 30 + size), 0.1, drift=0.5),
    Curve("bimodal", scale_curve(lambda size: 8 + size / 2), 0.1, 0.1, 3.0),
    Curve("bimodal step", step(8, 15, 90), 0.0, 0.05, 2.0),
)


def draw_curve(seed: int) -> Curve:
    rng = random.Random(seed)
    base, limit_size = rng.uniform(4, 30), rng.randint(2, 20)
    factor, slope = rng.uniform(1.5, 6), rng.choice([0.0, rng.uniform(0, 1)])
    second_size = rng.randint(limit_size + 1, MAX_BATCH_SIZE)
    kinds: dict[str, Callable[[int], float]] = {
        "step": lambda size: base * (1 if size <= limit_size else factor) + slope * size,
        "steps": lambda size: (
            base * (1 if size <= limit_size else factor if size <= second_size else factor * 2.5)
        ),
        "plateau": lambda size: base + base / 4 * min(size, limit_size),
        "falling": lambda size: base * (1 + factor / 2 * (MAX_BATCH_SIZE - size) / MAX_BATCH_SIZE),
        "fallen": lambda size: base * (factor if size < limit_size else 1),
        "tiles": lambda size: base / 2 + base * ((size + limit_size - 1) // limit_size),
        "line": lambda size: base + slope * size,
        "growing": lambda size: base + base / 50 * size ** (1 + factor / 5),
    }
    kind = rng.choice(sorted(kinds))
    curve = Curve(f"{kind} {seed}", scale_curve(kinds[kind]), rng.choice([0.0, 0.1, 0.3]))
    match rng.randrange(6):
        case 0:
            return replace(curve, drift=rng.uniform(0.5, 2.0))
        case 1:
            return replace(curve, slow=rng.uniform(0.03, 0.3), slower=rng.uniform(1.5, 3))
    return curve


@dataclass(frozen=True)
class Load:
    """`per_second` requests, as Poisson has it, or `clients` that pause for `pause_ms`."""

    per_second: float = 0.0
    clients: int = 0
    pause_ms: float = 0.0
    requests: int = 4000
    length_s: float = 0.0  # about

    def run(self, batcher: Batcher, curve: Curve, seed: int) -> Run:
        return Simulation(batcher, curve.timer(seed, self.length_s)).run(self.arriving(seed))

    def run_fixed(self, size: int, delay_ms: int, curve: Curve, seed: int) -> Run:
        timer = curve.timer(seed, self.length_s)
        return fixed_run(size, delay_ms * MS, timer, self.arriving(seed))

    def arriving(self, seed: int) -> Arriving:
        if self.clients:
            pause = exponential_pauses(self.pause_ms, seed)
            return Arriving.closed_loop(self.clients, self.requests, pause)
        return Arriving.open_loop(self.per_second, self.requests, seed)


def loads(curve: Curve, seed: int, count: int) -> Iterator[Load]:
    """Return three loads: two with fixed rates, and clients that wait for their responses."""
    rng = random.Random(seed)
    max_rate = curve.most_per_second
    for part in (rng.uniform(0.2, 0.5), rng.uniform(0.5, 0.85)):
        rate = part * max_rate
        yield Load(rate, requests=count, length_s=count / rate)
    clients = rng.choice([2, 4, 8, 12, 16, 24, 40])
    pause = rng.uniform(0.02, 1) * curve.ms[0]
    yield Load(0, clients, pause, count, 2 * count / max_rate)


@dataclass(frozen=True)
class Outcome:
    """Requests a second, and p99 in ms."""

    per_second: float
    p99_ms: float


def outcome(run: Run) -> Outcome:
    return Outcome(run.per_second, run.percentile_ms(99))


@dataclass(frozen=True)
class Compared:
    """A comparison with the fixed batcher of the highest throughput within the target."""

    name: str
    load: Load
    target_ms: float
    adaptive: Outcome
    best: Outcome

    @property
    def holds(self) -> bool:
        """Return whether the run meets the target with at least 95 % of the throughput."""
        rate = self.adaptive.per_second / self.best.per_second
        return self.adaptive.p99_ms <= self.target_ms and rate >= 0.95

    def __str__(self) -> str:
        kind = f"{self.load.clients} clients" if self.load.clients else "Poisson"
        return (
            f"{self.name}, {kind}: target {self.target_ms:.1f} ms, "
            f"p99 {self.adaptive.p99_ms:.1f} (fixed {self.best.p99_ms:.1f}) ms, "
            f"{self.adaptive.per_second:.0f} (fixed {self.best.per_second:.0f})/s"
        )


def compare(curve: Curve, load: Load, seed: int, target_ms: float = 0.0) -> Compared:
    """Run both batchers; the default target is 1.15 times the best latency of a fixed batcher."""
    fixed = [outcome(load.run_fixed(n, delay, curve, seed)) for n in SIZES for delay in DELAYS_MS]
    if not target_ms:
        factor = random.Random(seed).choice([1.15, 1.3, 1.6, 2.0, 3.0])
        target_ms = factor * min(result.p99_ms for result in fixed)
    results_within_target = [result for result in fixed if result.p99_ms <= target_ms]
    best_result = max(results_within_target, key=lambda result: result.per_second)
    rules = Batching(MAX_BATCH_SIZE, frozenset({MAX_BATCH_SIZE}), 0, int(target_ms * MS))
    adaptive = outcome(load.run(AdaptiveBatcher(rules), curve, seed))
    return Compared(curve.name, load, target_ms, adaptive, best_result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 36))
    parser.add_argument("--requests", type=int, default=12_000)
    args = parser.parse_args()
    curves = [*enumerate(NAMED_CURVES), *((seed, draw_curve(seed)) for seed in range(*args.seeds))]
    results = [
        compare(curve, load, 3 * seed + number)
        for seed, curve in curves
        for number, load in enumerate(loads(curve, seed, args.requests))
    ]
    for result in results:
        if not result.holds:
            print(result)
    for kind in (0, 1):
        picked = [result for result in results if bool(result.load.clients) == bool(kind)]
        print(
            f"{'clients' if kind else 'Poisson'}: "
            f"{sum(result.holds for result in picked)} of {len(picked)}; "
            f"p99 within the target {sum(e.adaptive.p99_ms <= e.target_ms for e in picked)}; "
            f"worst p99 {max(e.adaptive.p99_ms / e.target_ms for e in picked):.2f} of the target, "
            f"worst rate {min(e.adaptive.per_second / e.best.per_second for e in picked):.2f}"
        )


if __name__ == "__main__":
    main()
