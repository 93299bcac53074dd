"""Outputs computed where the client wants them: the last operation writes into its region.

    first call of a shape    watched: which operation made each output, and could it write into one?
    next call                was any output kept by the model? then never
    from then on             that operation is given the client's memory; nothing is copied

Most operations of torch have a form with `out=`. A model's calls are intercepted one operation at
a time (a few microseconds each), so only outputs are treated so that take longer to copy. Whatever
goes another way than it was watched is computed as always, and copied: where an output is in the
end decides whether it is (see scatter).

Only for a batch of one request, whose output is one tensor of its own with floats (what a client
could change under the model's hands must not be used as an index), and overlaps no input.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.descriptors import Place
from shmserve.workers.batch.placement import free_places
from shmserve.workers.batch.request import Request
from shmserve.workers.memory.device import as_bytes

logger = logging.getLogger(__name__)

# A copy of so many bytes costs as much as intercepting one operation.
_WORTH = 64 * 1024
_MOST_SHAPES = 64
# Operations whose shapes depend on values.
_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_NO_SESSION = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _Step:
    """Operation number `at` of a call, which makes an output; `form` writes it into a tensor.

    Its shape follows from `arguments`: the shapes of tensors, and the values of all else.
    """

    at: int
    operation: Any
    form: Any
    arguments: Any
    shape: tuple[int, ...]
    dtype: torch.dtype


_Plan = dict[str, _Step]  # by output


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operation made the tensor at each address, if it has another form."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._made: dict[int, _Step | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        at, self.count = self.count, self.count + 1
        if _has_address(result) and not _aliases(func):
            step = None
            form = _out_form(func, result.device.type)
            if form is not None and _whole(result) and result.dtype.is_floating_point:
                given = _described((args, kwargs))
                step = _Step(at, func, form, given, tuple(result.shape), result.dtype)
            self._made[result.untyped_storage().data_ptr()] = step
        return result

    def plan(self, outputs: Mapping[str, Any], wanted: Sequence[str]) -> _Plan:
        """The outputs that can be computed elsewhere."""
        tensors = {k: v for k, v in outputs.items() if _has_address(v)}
        addresses = [value.untyped_storage().data_ptr() for value in tensors.values()]
        found: _Plan = {}
        for name in wanted:
            value = tensors.get(name)
            if value is None or not _whole(value):
                continue
            address = value.untyped_storage().data_ptr()
            step = self._made.get(address)
            size = value.nbytes
            if step is not None and addresses.count(address) == 1 and size >= _WORTH * self.count:
                found[name] = step
        return found


class _Placer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives planned operations a tensor to write into; `targets` is by operation number."""

    def __init__(self, targets: dict[int, tuple[_Step, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = targets
        self._count = 0
        self.failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = self._targets.get(self._count)
        self._count += 1
        if target is not None and not self.failed:
            step, destination = target
            # Another shape would have torch resize the tensor, over whatever lies behind it.
            if func is step.operation and _described((args, kwargs)) == step.arguments:
                return step.form(*args, **(kwargs or {}), out=destination)
            self.failed = True
        return func(*args, **(kwargs or {}))


class InPlace:
    """Learns, and places, the outputs of one model on one device."""

    def __init__(self, model_name: str, mappings: Mappings, device: torch.device) -> None:
        self._model_name = model_name
        self._mappings = mappings
        self._device = device
        self._plans: dict[Any, _Plan] = {}
        self._given: list[Any] = []  # weak references to the storages of the last call's outputs
        self._never = False
        self._key: Any = None
        self._mode: _Watcher | _Placer | None = None

    def around(self, requests: Sequence[Request]) -> Any:
        """A context for the model's call on a batch."""
        self._mode = None
        if len(requests) != 1 or self._never:
            return _NO_SESSION
        places = free_places(requests[0], _WORTH)
        if not places:
            return _NO_SESSION
        if self._kept():
            logger.info("model '%s' keeps its outputs, so each is copied", self._model_name)
            self._never = True
            return _NO_SESSION
        self._key = (*((i.name, i.shape) for i in requests[0].inputs.values()), *places)
        plan = self._plans.get(self._key)
        if plan is None:
            if len(self._plans) >= _MOST_SHAPES:
                return _NO_SESSION
            self._mode = _Watcher()
            return self._mode
        targets = {
            step.at: (step, target)
            for name, step in plan.items()
            if (target := self._target(step, places[name])) is not None
        }
        if not targets:
            return _NO_SESSION
        self._mode = _Placer(targets)
        return self._mode

    def finish(self, requests: Sequence[Request], outputs: Mapping[str, Any]) -> None:
        """After the call: learn from it."""
        mode, self._mode = self._mode, None
        if isinstance(mode, _Watcher):
            self._plans[self._key] = mode.plan(outputs, list(free_places(requests[0], _WORTH)))
        elif isinstance(mode, _Placer) and mode.failed:
            self._plans[self._key] = {}
        if mode is not None:
            self._given = [
                value.untyped_storage()._weak_ref()
                for value in outputs.values()
                if _has_address(value)
            ]

    def _kept(self) -> bool:
        """Whether someone still has an output of the last call."""
        kept = False
        for reference in self._given:
            kept |= not torch.UntypedStorage._expired(reference)
            torch.UntypedStorage._free_weak_ref(reference)  # type: ignore[no-untyped-call]
        self._given = []
        return kept

    def _target(self, step: _Step, place: Place) -> torch.Tensor | None:
        size = step.dtype.itemsize
        for dim in step.shape:
            size *= dim
        if size > place.byte_size:
            return None  # the request fails, as it should, when it is written
        raw = as_bytes(self._mappings.view(Place(place.memory, place.offset, size)))
        aligned = not raw.data_ptr() % 64 and not raw.storage_offset() % step.dtype.itemsize
        if raw.device != self._device or not aligned:
            return None
        # With a storage of its own, which ends where the place does, and whose users can be seen.
        made: torch.Tensor = from_dlpack(raw)
        return made.view(step.dtype).view(step.shape)


def _has_address(value: Any) -> bool:
    """Whether it is a tensor with one storage: a sparse one has none."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, row-major."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _described(value: Any) -> Any:
    """Arguments of an operation, as far as the shape of its result follows from them."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    return value


def _aliases(operation: Any) -> bool:
    return any(value.alias_info is not None for value in operation._schema.returns)


@functools.cache
def _out_form(operation: Any, device: str) -> Any:
    """The overload of an operation that writes into a given tensor, without a copy; or None."""
    if not _DYNAMIC.isdisjoint(operation.tags):
        return None
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    wanted = [(value.name, str(value.type)) for value in operation._schema.arguments]
    if operation is torch.ops.aten.linear.default:
        return _linear_out
    packet = operation.overloadpacket
    for name in packet.overloads():
        form = getattr(packet, name)
        written = [
            value
            for value in form._schema.arguments
            if value.alias_info is not None and value.alias_info.is_write
        ]
        rest = [
            (value.name, str(value.type))
            for value in form._schema.arguments
            if value not in written
        ]
        if [value.name for value in written] != ["out"] or rest != wanted:
            continue
        # The others compute as always, and copy.
        operator = f"{form._schema.name}.{name}"
        if any(has_kernel(operator, k) for k in (device.upper(), "CompositeImplicitAutograd")):
            return form
    return None


def _linear_out(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor
) -> torch.Tensor:
    # torch's own form of it takes other steps, and rounds otherwise, from three dimensions on.
    if weight.dim() != 2 or not x.is_contiguous():
        return torch.nn.functional.linear(x, weight, bias)
    rows, result = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=result)
    else:
        torch.addmm(bias, rows, weight.t(), out=result)
    return out
