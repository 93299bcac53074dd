"""The cost of tracing.

Two shmserve servers with the same model are measured in turns by `shmserve perf` over HTTP. One of
them sends its traces to a collector, which discards them.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from bench.load.perf import run_shmserve_perf
from bench.report.results import SHMSERVE, TRITON, Figure, Row, Target
from bench.system.servers import BENCH, Shmserve, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.context import Context


_NEVER = 2**32 - 1
_IN_FLIGHT = 16


@dataclass(frozen=True)
class TraceCase:
    """A case in which one of `rate` requests is traced."""

    name: str
    rate: int
    figure: Figure


def _case(name: str, rate: int, title: str, must: float) -> TraceCase:
    title = f"HTTP, simple, {_IN_FLIGHT} in flight: {title}, against none"
    return TraceCase(
        name, rate, Figure(name, title, "infer/s", "higher", Target("ratio", must, 1.0))
    )


TRACES = (
    _case("traces-none", _NEVER, "traces, of which none is taken", 0.98),
    _case("traces-100", 100, "traces of one in 100", 0.97),
)


def run(case: TraceCase, context: Context) -> list[Row]:
    """Return samples of both servers; the server without traces has the column of the peer.

    Raises:
        Exception: The measurement of either server failed, with its error.
    """
    row = Row(case.figure, {})
    with ExitStack() as stack:
        settings = ("mode=opentelemetry", "level=TIMESTAMPS", f"rate={case.rate}")
        url = f"opentelemetry,url={stack.enter_context(_collector())}"
        trace_flags = [f"--trace-config={setting}" for setting in (*settings, url)]
        model = BENCH / "models" / "simple"
        servers = []
        for column, flags in ((SHMSERVE, trace_flags), (TRITON, [])):
            context.log(f"{case.name}: starting shmserve {' '.join(flags)}")
            server = stack.enter_context(
                running(Shmserve(), [model], flags, notes=context.results.notes)
            )
            servers.append((column, server))
        for turn in range(context.settings.repeats):
            for column, server in servers[:: -1 if turn % 2 else 1]:
                load = (f"--url=http://{server.address('http')}", f"--concurrency={_IN_FLIGHT}")
                point = run_shmserve_perf("simple", *load, seconds=context.settings.seconds)
                row.samples.setdefault(column, []).append(point["per_second"])
        samples = ", ".join(f"{column} {values}" for column, values in row.samples.items())
        context.log(f"{case.name}: {samples}")
    return [row]


@contextmanager
def _collector() -> Iterator[str]:
    """Start a collector that accepts everything, and yield its address."""

    class _Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Do nothing: requests are not logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        finally:
            server.shutdown()
