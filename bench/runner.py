"""The runner of the benchmark's cases, one after the other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.cases import native, streams, tracing
from bench.cases.tables import (
    DYNAMIC,
    LOADS,
    MEMCPY,
    QUEUE,
    QUEUE_COST,
    STANDING,
    LoadCase,
    StandingCase,
)
from bench.context import Context
from bench.load import perf, queue_cost
from bench.load.client import RequestFailed
from bench.report.results import MACHINE, SHMSERVE, Results, Row
from bench.system import ensembles
from bench.system.peer import Analyzer
from bench.system.servers import BENCH, Server, ServerFailed, running

_WARM_UP_S = 1.5
_CASE_FAILURES = (ServerFailed, perf.LoadFailed, RequestFailed, OSError)
_MEASURED_CASES: tuple[tuple[Callable[[Any, Context], list[Row]], tuple[Any, ...]], ...] = (
    (native.run, native.NATIVE),
    (streams.run, streams.STREAMS),
    (tracing.run, tracing.TRACES),
)


class Runner:
    """One run of the benchmark: the servers, the load generator, and the results so far."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings
        self.results = context.results
        self._ensemble_folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self) -> Results:
        """Measure every selected case."""
        loads = [case for case in (*LOADS, *DYNAMIC) if self._settings.selects(case.name)]
        natives = any(self._settings.selects(case.name) for case in native.NATIVE)
        analyzer = self._context.find_analyzer() if loads or natives else None
        if analyzer:
            for load in loads:
                self._run_load(load, analyzer)
        for measure, cases in _MEASURED_CASES:
            for case in cases:
                if self._settings.selects(case.name):
                    try:
                        for row in measure(case, self._context):
                            self._add(row)
                    except _CASE_FAILURES as error:
                        self._context.skip(case.name, str(error), failed=True)
        if self._settings.selects(QUEUE):
            for queue_size, figure in QUEUE_COST.items():
                self._context.log(f"{QUEUE}: {queue_size:,} queued")
                costs = [queue_cost.sample(queue_size) for _ in range(self._settings.repeats)]
                self._add(Row(figure, {SHMSERVE: costs}))
        if self._settings.selects(MEMCPY.name):
            samples = [native.memcpy_sample() for _ in range(self._settings.repeats)]
            self._add(Row(MEMCPY, {MACHINE: samples}))
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for standing_case in STANDING:
                if self._settings.selects(standing_case.name):
                    self._run_standing(standing_case, Path(folder))
        return self.results

    def _run_load(self, case: LoadCase, analyzer: Analyzer) -> None:
        """Measure a load on both servers, which run together and take turns at being first."""
        row = Row(case.figure, {}, {})
        with ExitStack() as stack:
            servers = self._start(case, stack)
            warm_up = partial(self._warm_up, case=case, analyzer=analyzer)
            for server in list(servers):
                self._attempt(servers, server, case, warm_up)
            sample = partial(self._sample, row=row, case=case, analyzer=analyzer)
            for turn in range(self._settings.repeats):
                for server in servers[:: -1 if turn % 2 else 1]:
                    self._attempt(servers, server, case, sample)
        self._add(row)
        for column, figure in case.further_figures:
            samples = {
                server: [report[column] for report in reports]
                for server, reports in row.details.items()
            }
            self._add(Row(figure, samples))

    def _start(self, case: LoadCase, stack: ExitStack) -> list[Server]:
        servers = []
        for product in self._context.products():
            self._context.log(f"{case.name}: starting {product.name}")
            notes = self.results.notes
            try:
                models = list(map(self._model, (case.load.model, *case.load.steps)))
                server = running(product, models, notes=notes)
                servers.append(stack.enter_context(server))
            except _CASE_FAILURES as error:
                self._context.skip(f"{case.name}, {product.name}", str(error), failed=True)
        return servers

    def _model(self, name: str) -> Path:
        """Return the folder of a model: in bench/models, or a folder that is written on demand."""
        folder = BENCH / "models" / name
        if folder.is_dir():
            return folder
        if self._ensemble_folder is None:
            self._ensemble_folder = tempfile.TemporaryDirectory(prefix="bench-models-")
            ensembles.write(Path(self._ensemble_folder.name))
        return Path(self._ensemble_folder.name, name)

    def _attempt(
        self, servers: list[Server], server: Server, case: LoadCase, step: Callable[[Server], None]
    ) -> None:
        """Run one step of a case with a server.

        If the step fails, the case continues without that server.
        """
        try:
            step(server)
        except _CASE_FAILURES as error:
            servers.remove(server)
            self._context.skip(f"{case.name}, {server.name}", str(error), failed=True)

    def _warm_up(self, server: Server, case: LoadCase, analyzer: Analyzer) -> None:
        with server.client() as client:
            self.results.versions[server.name] = client.call("GET", "/v2")["version"]
            if case.load.model == "simple":
                client.infer("simple")
        perf.measure(analyzer, case.load, server.address(case.load.listener), _WARM_UP_S)

    def _sample(self, server: Server, row: Row, case: LoadCase, analyzer: Analyzer) -> None:
        address = server.address(case.load.listener)
        report = perf.measure(analyzer, case.load, address, self._settings.seconds)
        row.samples.setdefault(server.name, []).append(report[case.column])
        row.details.setdefault(server.name, []).append(report)
        value = f"{report[case.column]:,.0f} {case.figure.unit}"
        progress = f"{len(row.samples[server.name])}/{self._settings.repeats}"
        self._context.log(f"{case.name}: {server.name} {value} ({progress})")

    def _run_standing(self, case: StandingCase, folder: Path) -> None:
        model_folder = BENCH / "models" / case.model
        model = self._torch_model(folder) if case.model == "torch" else model_folder
        rows = [Row(figure, {}) for figure in case.figures]
        for product in self._context.products(case.with_triton) if model else ():
            assert model is not None
            self._context.log(f"{case.name}: {product.name}")
            try:
                result = case.measure(product, model, self._settings.repeats, self.results.notes)
            except _CASE_FAILURES as error:
                self._context.skip(f"{case.name}, {product.name}", str(error), failed=True)
                continue
            for row, samples in zip(rows, result.samples, strict=True):
                row.samples[product.name] = samples
            if result.raw:
                self.results.raw_delays_us[product.name] = result.raw
        for row in rows:
            self._add(row)

    def _add(self, row: Row) -> None:
        if row.samples:
            self.results.rows.append(row)

    def _torch_model(self, folder: Path) -> Path | None:
        model = folder / "torch"
        if not model.exists():
            command = [sys.executable, "-m", "bench.system.torch_model", str(model)]
            process = subprocess.run(
                command, cwd=BENCH.parent, capture_output=True, text=True, check=False
            )
            if process.returncode != 0:
                self._context.skip("torch model", process.stderr.strip()[-300:], failed=True)
                return None
        return model
