"""The times of local clients' requests, which no gateway sees: one of so many is traced, and with a
limit each is measured, so that those that take longer are told.

    begin ──> Submit.trace ... response ──ended──> RequestTraced, to the supervisor
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from shmserve.common.trace_settings import Sampler, TraceSettings
from shmserve.ipc.messages.inference import Failed, Finished, Responded, Submit
from shmserve.ipc.messages.supervision import RequestTraced, SetTracing
from shmserve.ipc.trace import TraceContext
from shmserve.ipc.transport.router import first_number
from shmserve.scheduler.outboxes import ControlLink

_NS_PER_MS = 1_000_000


class LocalTraces:
    """Those of one scheduler, of a model's `version`. `active`: some are wanted; `open`: the
    requests whose times are, by client and number."""

    def __init__(self, model: str, version: str, control: ControlLink) -> None:
        self._model = model
        self._version = version
        self._control = control
        self._sampler = Sampler(TraceSettings())
        self._slow_ns = 0
        self.active = False
        self.open: dict[tuple[bytes, int], tuple[Submit, bool]] = {}

    def use(self, message: SetTracing) -> None:
        """Measure like this from now on; the same settings count on."""
        settings = message.settings
        own = TraceSettings(**settings.get(self._model, settings[""]))
        if own != self._sampler.settings:
            self._sampler = Sampler(own)
        self._slow_ns = message.slow_request_ms * _NS_PER_MS
        self.active = own.on or self._slow_ns > 0

    def begin(self, peer: bytes, submit: Submit) -> Submit:
        """A client's request as it goes on: with a trace, if its times are wanted."""
        context = TraceContext.of(submit.trace)
        sampled = self._sampler.samples(context.sampled if context.parent_id else None)
        if not sampled and not self._slow_ns:
            return submit
        if not submit.trace:
            submit = replace(submit, trace=TraceContext.new(sampled).message)
        self.open[peer, submit.id] = submit, sampled
        return submit

    def ended(self, peer: bytes, message: Any) -> None:
        """Tell of a request, if this is the last that its client is sent about it."""
        if type(message) is Responded:
            if not message.final:
                return
        elif type(message) is not Finished and type(message) is not Failed:
            return
        found = self.open.pop((peer, message.id), None)
        if found is not None:
            error = "" if type(message) is Finished or not message.code else message.message
            self._tell(*found, b"" if type(message) is Failed else message.spans, error)

    def _tell(self, submit: Submit, sampled: bool, spans: bytes, error: str) -> None:
        now_ns = time.monotonic_ns()
        if not (sampled or now_ns - submit.arrived_ns > self._slow_ns > 0):
            return
        of_model = (self._model, self._version, submit.request_id)
        times = (submit.arrived_ns, now_ns)
        self._control.post(RequestTraced(*of_model, submit.trace, sampled, *times, spans, error))

    def forget(self, number: int) -> None:
        """A local client is gone: it is sent nothing more."""
        for key in [key for key in self.open if first_number(key[0]) == number]:
            self._tell(*self.open.pop(key), b"", "its client has gone")
