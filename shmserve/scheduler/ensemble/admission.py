"""Admission of requests: a client's message -> a request whose flow has begun."""

from __future__ import annotations

from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.tensors.inference import unpack_inference
from shmserve.ipc.tensors.signature import Signature
from shmserve.scheduler.ensemble.flow import Plan
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.requests import EnsembleRequest
from shmserve.scheduler.ensemble.responses import check_places
from shmserve.scheduler.ensemble.steps.targets import Targets
from shmserve.scheduler.ensemble.values import ABSENT, Value
from shmserve.scheduler.requests.client import Client

_MOST_PLANS = 64


class RequestAdmission:
    """Makes requests of messages; those that want the same outputs share a plan, for as long as the
    models of the steps stay."""

    def __init__(
        self, graph: Graph, signature: Signature, targets: Targets, memory: EnsembleMemory
    ) -> None:
        self._graph = graph
        self._batched = signature.max_batch_size > 0
        self._targets = targets
        self._memory = memory
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._plans_of = 0

    def admit(
        self, client: Client[EnsembleRequest], message: Submit, now_ns: int
    ) -> EnsembleRequest:
        """The request that a message submits. Raises MalformedMessage, Unavailable when a step has
        no model, InvalidArgument when a tensor lies where it cannot."""
        inference = unpack_inference(message.work)
        graph = self._graph
        outputs = tuple(output.name for output in inference.outputs) or graph.outputs
        request = EnsembleRequest(client, message, inference, self._plan(outputs), now_ns)
        check_places(request, graph)
        inputs = dict.fromkeys(graph.inputs, ABSENT)
        for tensor in inference.inputs:
            holds = tensor.name not in graph.conditions or self._memory.any_true(tensor)
            inputs[tensor.name] = Value(tensor, holds=holds, batched=self._batched)
        request.flow.begin(inputs)
        return request

    def _plan(self, outputs: tuple[str, ...]) -> Plan:
        if self._plans_of != self._targets.changes or len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._plans_of = self._targets.changes
        plan = self._plans.get(outputs)
        if plan is None:
            plan = self._plans[outputs] = Plan(self._graph, outputs, self._targets)
        return plan
