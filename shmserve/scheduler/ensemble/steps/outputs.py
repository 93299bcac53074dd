"""The outputs of steps: a response -> values in the flow of its request, whose memory is given back
when nobody uses them any more.

Responses of a step that gives any number of them are granted one by one (credit-based flow
control): the next may come when nothing that was made of one is in use, down to the responses that
the ensemble's client has yet to read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from shmserve.errors import ShmserveError
from shmserve.ipc.memory.lent import Block, Holding, Token, releases
from shmserve.ipc.messages.inference import Finished, Release, Responded
from shmserve.ipc.scheduler_client import SchedulerClient
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import Inferred, ResponseSchema
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.scheduler.ensemble.flow import Firing
from shmserve.scheduler.ensemble.graph import ONCE, Graph
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.requests import StepRequest
from shmserve.scheduler.ensemble.values import Value

_OVERRIDES = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(eq=False)
class StepOutputs:
    """Puts what steps give into the flow of their requests."""

    _graph: Graph
    _memory: EnsembleMemory
    _schedulers: SchedulerClient[StepRequest]

    def __post_init__(self) -> None:
        self._schemas: Schemas[ResponseSchema] = Schemas(ResponseSchema)

    def made(self, step: StepRequest, message: Finished | Responded) -> None:
        """A step has given outputs. Raises MalformedMessage; Unavailable when their memory is gone,
        InvalidArgument when a condition lies where it cannot be read: then nothing is kept."""
        request = step.request
        schema = self._schemas.find(message.schema) or self._schemas.learn(message.schema)
        inferred = schema.inferred(message.data)
        if request.over or (step.answered and step.firing.step.index not in request.plan.decoupled):
            self.credit_discarded(step, message)
            self._release(step, inferred.outputs)
            return
        step.answered = True
        more_follow = isinstance(message, Responded) and not message.final
        request.flow.respond(step.firing, self._values(step, inferred, more_follow))

    def credit_discarded(self, step: StepRequest, message: Finished | Responded) -> None:
        """Return the credit of a step's response that nobody reads, if others follow."""
        if isinstance(message, Responded) and not message.final:
            self._schedulers.credit(step, 1)

    def _values(self, step: StepRequest, inferred: Inferred, more_follow: bool) -> dict[str, Value]:
        """The outputs of a response; `more_follow`: once nobody uses it, the next may come."""
        given, firing = inferred.parameters, step.firing
        override = {key: given[key] for key in _OVERRIDES if key in given} if given else {}
        override = override or step.override
        follows_many = step.request.plan.follows[firing.step.index] != ONCE
        held = _held_back(firing) if follows_many else ()
        own = Holding(lambda: self._schedulers.credit(step, 1)) if more_follow else None
        if own is not None:
            held = (*held, own)
        batched = step.target.signature.max_batch_size > 0
        values: dict[str, Value] = {}
        try:
            for tensor in inferred.outputs:
                holds = True
                if firing.step.outputs.get(tensor.name) in self._graph.conditions:
                    holds = self._memory.any_true(tensor)
                kept, memory = self._keep(step, tensor)
                values[tensor.name] = Value(
                    kept,
                    memory,
                    holds=holds,
                    batched=batched,
                    override=override,
                    held_credits=held,
                )
        except ShmserveError:
            for value in values.values():
                value.release()
            rest = tuple(tensor for tensor in inferred.outputs if tensor.name not in values)
            self._release(step, rest)
            raise
        finally:
            if own is not None:
                own.release()
        return values

    def _keep(self, step: StepRequest, tensor: TensorRef) -> tuple[TensorRef, Token | None]:
        """An output where it may stay, and the token that keeps its memory; None: it lies in none
        of ours.

        Whoever made it takes it back when this process ends. So what a client is to read, which
        may go on after that, is copied: an ensemble lends its own memory alone.
        """
        data = tensor.data
        if not isinstance(data, Place) or tensor.name in step.given:
            return tensor, None
        block = step.placed.pop(tensor.name, None)
        if block is not None:
            return tensor, _returned(step, data, block)
        self._memory.hold(data)
        if step.firing.step.outputs.get(tensor.name) not in step.request.plan.outputs:
            return tensor, Holding(partial(self._let_go, step.endpoint, data))
        try:
            block = self._memory.copy(data)
        except ShmserveError:
            self._memory.let_go(data)
            raise
        self._let_go(step.endpoint, data)
        return replace(tensor, data=block.place), block

    def _let_go(self, endpoint: str, place: Place) -> None:
        self._memory.let_go(place)
        release = Release(place.memory.pid, [place.offset], place.memory.id)
        self._schedulers.release(endpoint, (release,))

    def _release(self, step: StepRequest, outputs: tuple[TensorRef, ...]) -> None:
        """Tell a step's workers that nobody reads these outputs."""
        ours = step.given | step.placed.keys()
        datas = [tensor.data for tensor in outputs if tensor.name not in ours]
        read = releases([data for data in datas if isinstance(data, Place)])
        self._schedulers.release(step.endpoint, read)


def _returned(step: StepRequest, place: Place, block: Block) -> Block:
    """The block that keeps an output: that of an input, where the model has returned it, or the
    one that the output was to go to."""
    if place.offset == block.place.offset and place.memory.id == block.place.memory.id:
        return block
    for value in step.firing.inputs.values():
        returned = value.block_at(place)
        if returned is not None:
            returned.acquire()
            block.release()
            return returned
    return block


def _held_back(firing: Firing) -> tuple[Token, ...]:
    """The credits of the responses that a step's inputs came of."""
    found = (credit for value in firing.inputs.values() for credit in value.held_credits)
    return tuple(dict.fromkeys(found))
