"""`python -m bench.chaos --minutes N --seed S`; the exit status is 1 if a failure was found."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.chaos.faults import Host, Stage, draw
from bench.chaos.ledger import Ledger
from bench.chaos.loads import LOADS, Clients
from bench.chaos.state import Probe, ServerResources
from bench.soak import quantile
from tests.rigs.pipelines import add_ensemble, add_model, step, tensor
from tests.support import repositories
from tests.support.hf_folders import write_folder
from tests.support.sequence_models import controls, instances
from tests.support.servers import running

# Maximum seconds of an execution: the server kills a worker that exceeds them.
EXECUTION_LIMIT_S = 5

_RATE_LIMITER = 'rate_limiter { resources [ { name: "R" count: 1 } ] }'
_MAX_IDLE = "max_sequence_idle_microseconds: 3000000"
_LEAK_CODE = """
        if command == "leak":
            self.kept = bytearray(512 << 20)
            self.kept[::4096] = bytes([1]) * len(self.kept[::4096])
        if command == "raise":"""


def write_models(repository: Path) -> None:
    """Write the model repository: a small model for each kind of scheduler."""
    repository.mkdir()
    repositories.add(repository, "simple", "identity", "repeat", "crimes")
    repositories.add_as(repository, "swap", "simple")
    code = repository / "crimes" / "1" / "model.py"
    code.write_text(code.read_text().replace('\n        if command == "raise":', _LEAK_CODE, 1))
    for strategy in ("direct", "oldest"):
        batching = (
            f"sequence_batching {{ {strategy} {{ }} {_MAX_IDLE} {controls()} }} {instances(2)}"
        )
        repositories.add_as(repository, f"sums_{strategy}", "sequencer", batching)
    for name, count in (("limited", 1), ("rival", 2)):
        add_model(repository, name, 'return self.response(Y=self.input(request, "X") * 3)')
        config = repository / name / "config.pbtxt"
        group = f"kind: KIND_CPU count: {count} {_RATE_LIMITER}"
        config.write_text(config.read_text().replace("kind: KIND_CPU", group))
    add_one = 'return self.response(Y=self.input(request, "X") + 1)'
    add_model(repository, "cached", add_one, settings="response_cache { enable: true }")
    add_model(repository, "add", add_one)
    add_model(repository, "double", 'return self.response(Y=self.input(request, "X") * 2)')
    steps = [step("add", {"X": "IN"}, {"Y": "t"}), step("double", {"X": "t"}, {"Y": "OUT"})]
    add_ensemble(repository, "pipeline", steps, [tensor("IN")], [tensor("OUT")])
    write_folder(repository / "tiny" / "1")


# Environment variable that is set if /dev/shm is private to this run.
_PRIVATE = "CHAOS_PRIVATE_SHM"
_SHM_BYTES = 256 << 20
_CGROUP = Path("/sys/fs/cgroup/memory")
_WARM_UP = 0.1  # share of the run that passes before the first measurement of resources
_MAX_PAUSE_S = 0.2


def main(arguments: Sequence[str]) -> int:
    """Run the test, and print the findings."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--pace", type=float, default=0.0, help="seconds from fault to fault")
    parser.add_argument("--log", type=Path, help="file to which the server's log is copied")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _enter_private_shm(arguments)
    ledger = Ledger()
    print(f"seed {options.seed}", flush=True)
    with _host() as (host, prefix, environment):
        for missing_fault in host.missing_faults:
            print(f"not injected: {missing_fault}")
        _run(options, ledger, host, prefix, environment)
    if ledger.has_failed:
        print("\n".join(["the last events:", *ledger.events, *ledger.failures]))
        print(f"FAILED: {len(ledger.failures)} findings, seed {options.seed}")
    return int(ledger.has_failed)


def _run(
    options: argparse.Namespace,
    ledger: Ledger,
    host: Host,
    prefix: Sequence[str],
    environment: dict[str, str],
) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        repository = Path(folder) / "models"
        write_models(repository)
        flags = (
            "--model-control-mode=explicit",
            "--load-model=*",
            "--gateways=2",
            f"--execution-timeout-secs={EXECUTION_LIMIT_S}",
            "--cache-config=local,size=1000000",
            "--rate-limit=execution_count",
        )
        with running(
            repository, *flags, grpc=True, prefix=prefix, environment=environment
        ) as server:
            server.gate.close()
            stage = Stage(server, ledger, host, random.Random(options.seed))
            seconds = 60 * options.minutes
            _run_faults(stage, options, _WARM_UP * seconds)
            resources_before = ServerResources.of(server)
            print(f"before: {resources_before.as_text()}", flush=True)
            ledger.recoveries.clear()
            _run_faults(stage, options, seconds)
            if not ledger.has_failed:
                for difference in resources_before.wait_restored(server):
                    ledger.fail(f"resources have grown: {difference}")
            print(f"after:  {ServerResources.of(server).as_text()}")
            _report(stage)
            if options.log:
                shutil.copy(server.log_path, options.log)


def _run_faults(stage: Stage, options: argparse.Namespace, seconds: float) -> None:
    """Inject random faults under load, one after the other."""
    ledger = stage.ledger
    end_s = time.monotonic() + seconds
    with Clients(stage.server, ledger, options.seed, LOADS), Probe(stage.server) as probe:
        ledger.wait_recovered(ledger.begin("start"), time.monotonic(), 60.0)
        while time.monotonic() < end_s and not ledger.has_failed:
            start_s = time.monotonic()
            draw(stage.rng)(stage)
            pause = stage.rng.random() * _MAX_PAUSE_S
            time.sleep(max(pause, options.pace - (time.monotonic() - start_s)))
    print(
        f"readiness: {probe.probe_count} probes, {probe.not_ready_count} of them not ready, "
        f"slowest response {probe.slowest_s:.3f} s",
        flush=True,
    )


def _report(stage: Stage) -> None:
    ledger = stage.ledger
    print(f"{sum(ledger.correct_counts.values())} correct responses, {stage.kills} kills")
    for load, count in sorted(ledger.correct_counts.items()):
        mean_ms = 1000 * ledger.total_s[load] / count
        print(f"  {count:8} {load:18} mean {mean_ms:6.1f} ms, max {ledger.slowest_s[load]:6.3f} s")
    for (load, reason), count in sorted(ledger.allowed_errors.items()):
        print(f"  {count:8} allowed errors of {load}: {reason}")
    for line in ledger.slow_recoveries:
        print(f"slow: {line}")
    print("recovery times in s:                n     p50     p99     max")
    recovery_times = [time_s for times in ledger.recoveries.values() for time_s in times]
    for kind, times in [*sorted(ledger.recoveries.items()), ("all faults", recovery_times)]:
        if times:
            percentiles = " ".join(f"{quantile(times, share):7.3f}" for share in (0.5, 0.99, 1.0))
            print(f"  {kind:28} {len(times):6} {percentiles}")


# --- the host


def _enter_private_shm(arguments: Sequence[str]) -> None:
    """Re-execute in a mount namespace with a /dev/shm of its own, if that is permitted."""
    mount = f"mount -t tmpfs -o size={_SHM_BYTES} chaos /dev/shm"
    prefix = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if _PRIVATE in os.environ or shutil.which("unshare") is None:
        return
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
        command = [*prefix, sys.executable, "-m", "bench.chaos", *arguments]
        os.execvpe(command[0], command, {**os.environ, _PRIVATE: "1"})


@contextmanager
def _host() -> Iterator[tuple[Host, list[str], dict[str, str]]]:
    """Yield the faults that this host permits, and the command that starts the server.

    Yields:
        The host, the command's prefix, and environment variables.
    """
    host, prefix, environment = Host(private_shm=_PRIVATE in os.environ), [], {}
    if not host.private_shm:
        host.missing_faults.append("full /dev/shm (no permission to create a mount namespace)")
    group = _CGROUP / f"chaos-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            group.mkdir()
        except OSError:
            host.missing_faults.append("leak (no permission to create a control group, version 1)")
        else:
            host.cgroup = group
            stack.callback(_remove, group)
            script = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            prefix = ["sh", "-c", script, "sh"]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        library = folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        build = ["cc", "-shared", "-fPIC", "-o", str(library), str(source)]
        if shutil.which("cc") and subprocess.run(build, check=False).returncode == 0:
            host.clock = folder / "clock"
            host.clock.write_bytes(bytes(8))
            environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(host.clock)}
        else:
            host.missing_faults.append("clock jumps (no C compiler)")
        yield host, prefix, environment


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 5
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
