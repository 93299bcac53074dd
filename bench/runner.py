"""Runs the cases one after the other and collects what they find."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench import machine, memcpy, native, perf, streams
from bench.cases import LOADS, MEMCPY, STANDING, LoadCase, StandingCase
from bench.client import RequestFailed
from bench.peer import Analyzer, Missing, TritonFiles, find_analyzer, find_triton
from bench.results import MACHINE, NotRun, Results, Row
from bench.run import Settings
from bench.servers import BENCH, Product, Server, ServerFailed, Shmserve, Triton, running

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP_S = 1.5
_FAILURES = (ServerFailed, perf.LoadFailed, RequestFailed, OSError)


class Runner:
    """One run: the servers, the load generator, and the results so far."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.say = say
        self.results = Results(
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            machine.describe(),
            machine.versions(),
            {"repeats": settings.repeats, "seconds": settings.seconds},
        )
        self.triton = self._find_triton()
        self.analyzer: Analyzer | None = None

    def run(self) -> Results:
        """Measure every case that was asked for."""
        loads = [case for case in LOADS if self.settings.wants(case.name)]
        natives = [case for case in native.NATIVE if self.settings.wants(case.name)]
        analyzer = self.analyzer = self._find_analyzer() if loads or natives else None
        if analyzer:
            for load in loads:
                self._run_load(load, analyzer)
        for case in natives:
            try:
                self._add(native.run(case, self))
            except _FAILURES as error:
                self._skip(case.name, str(error), failed=True)
        for streamed in streams.STREAMS:
            if self.settings.wants(streamed.name):
                try:
                    for row in streams.run(streamed, self):
                        self._add(row)
                except _FAILURES as error:
                    self._skip(streamed.name, str(error), failed=True)
        if self.settings.wants(MEMCPY.name):
            samples = [memcpy.sample() for _ in range(self.settings.repeats)]
            self._add(Row(MEMCPY, {MACHINE: samples}))
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for standing in STANDING:
                if self.settings.wants(standing.name):
                    self._run_standing(standing, Path(folder))
        return self.results

    def _run_load(self, case: LoadCase, analyzer: Analyzer) -> None:
        """Both servers up, one of them under load at a time, taking turns at going first."""
        row = Row(case.figure, {}, {})
        with ExitStack() as started:
            servers = self._start(case, started)
            warm_up = partial(self._warm_up, case=case, analyzer=analyzer)
            for server in list(servers):
                self._attempt(servers, server, case, warm_up)
            sample = partial(self._sample, row=row, case=case, analyzer=analyzer)
            for turn in range(self.settings.repeats):
                for server in servers[:: -1 if turn % 2 else 1]:
                    self._attempt(servers, server, case, sample)
        self._add(row)

    def _start(self, case: LoadCase, started: ExitStack) -> list[Server]:
        servers = []
        for product in self.products():
            self.say(f"{case.name}: starting {product.name}")
            notes = self.results.notes
            try:
                server = running(product, [BENCH / "models" / case.load.model], notes=notes)
                servers.append(started.enter_context(server))
            except _FAILURES as error:
                self._skip(f"{case.name}, {product.name}", str(error), failed=True)
        return servers

    def _attempt(
        self, servers: list[Server], server: Server, case: LoadCase, step: Callable[[Server], None]
    ) -> None:
        """Do one step with a server; when it fails, the case goes on without that server."""
        try:
            step(server)
        except _FAILURES as error:
            servers.remove(server)
            self._skip(f"{case.name}, {server.name}", str(error), failed=True)

    def _warm_up(self, server: Server, case: LoadCase, analyzer: Analyzer) -> None:
        with server.client() as client:
            self.results.versions[server.name] = client.call("GET", "/v2")["version"]
            if case.load.model == "simple":
                client.infer("simple")
        perf.measure(analyzer, case.load, server.address(case.load.listener), _WARM_UP_S)

    def _sample(self, server: Server, row: Row, case: LoadCase, analyzer: Analyzer) -> None:
        address = server.address(case.load.listener)
        report = perf.measure(analyzer, case.load, address, self.settings.seconds)
        row.samples.setdefault(server.name, []).append(report[case.column])
        row.details.setdefault(server.name, []).append(report)
        value = f"{report[case.column]:,.0f} {case.figure.unit}"
        taken = f"{len(row.samples[server.name])}/{self.settings.repeats}"
        self.say(f"{case.name}: {server.name} {value} ({taken})")

    def _run_standing(self, case: StandingCase, folder: Path) -> None:
        given = BENCH / "models" / case.model
        model = self._torch_model(folder) if case.model == "torch" else given
        rows = [Row(figure, {}) for figure in case.figures]
        for product in self.products(case.with_triton) if model else ():
            assert model is not None
            self.say(f"{case.name}: {product.name}")
            try:
                measured = case.measure(product, model, self.settings.repeats, self.results.notes)
            except _FAILURES as error:
                self._skip(f"{case.name}, {product.name}", str(error), failed=True)
                continue
            for row, samples in zip(rows, measured.samples, strict=True):
                row.samples[product.name] = samples
            if measured.raw:
                self.results.raw_delays_us[product.name] = measured.raw
        for row in rows:
            self._add(row)

    def _add(self, row: Row) -> None:
        if row.samples:
            self.results.rows.append(row)

    def _torch_model(self, folder: Path) -> Path | None:
        model = folder / "torch"
        if not model.exists():
            command = [sys.executable, "-m", "bench.torch_model", str(model)]
            made = subprocess.run(
                command, cwd=BENCH.parent, capture_output=True, text=True, check=False
            )
            if made.returncode != 0:
                self._skip("torch model", made.stderr.strip()[-300:], failed=True)
                return None
        return model

    def products(self, with_triton: bool = True) -> list[Product]:
        """What is measured: ourselves, and Triton where there is one."""
        return [Shmserve(), *([Triton(self.triton)] if self.triton and with_triton else [])]

    def _find_triton(self) -> TritonFiles | None:
        try:
            if not self.settings.with_peer:
                raise Missing("--no-peer")
            return find_triton(self.settings.peer)
        except Missing as missing:
            self._skip("Triton", str(missing))
            return None

    def _find_analyzer(self) -> Analyzer | None:
        try:
            analyzer = find_analyzer(self.settings.peer)
        except Missing as missing:
            self._skip("everything that perf_analyzer would send", str(missing))
            return None
        self.results.versions["perf_analyzer"] = analyzer.version
        return analyzer

    def _skip(self, what: str, why: str, *, failed: bool = False) -> None:
        self.results.not_run.append(NotRun(what, why, failed))
        self.say(f"{what}: not measured: {why}")
