"""The signature of a native model's `predict` by its annotations: inputs, outputs, result."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np

from shmserve.errors import Collected, Internal, InvalidArgument
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.model import TensorType
from shmserve.workers.user_code import in_words

P = ParamSpec("P")
T = TypeVar("T")

# What a `predict` returns, or says that it yields, that gives any number of responses.
_ITERATORS = (
    collections.abc.Iterable,
    collections.abc.Iterator,
    collections.abc.Generator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncIterator,
    collections.abc.AsyncGenerator,
)
Where = Callable[[str], str]  # the beginning of a line on an attribute, or on "predict.ARGUMENT"
_HOW = "annotate it like FP32[torch.Tensor, 1, 8, 8], with FP32 from shmserve.model"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of `predict`; `numpy`: wanted as a numpy array; `optional`: it has a default,
    which stands for an input that requests do not have."""

    name: str
    type: TensorType
    numpy: bool
    optional: bool


@dataclass(frozen=True, slots=True)
class PredictSignature:
    """The arguments of `predict` and its outputs; `take` makes name -> array of a result, or of
    each that is yielded where it gives an iterator (`streams`)."""

    parameters: tuple[Parameter, ...]
    outputs: dict[str, TensorType]
    take: Callable[[Any], Mapping[str, Any]]
    streams: bool


def nowhere(name: str) -> str:
    """The beginning of a line where no places are known."""
    return ""


def read(model: type, at: Where = nowhere) -> PredictSignature:
    """The signature of a class's `predict`.

    Raises InvalidArgument, with what to write, when the class has none that is an ordinary method,
    or an annotation is not a tensor's; with a line for each argument that is wrong.
    """
    wrong = Collected()
    found = wrong(_found, model, at, wrong)
    if wrong.problems:
        raise InvalidArgument("\n".join(wrong.problems))
    return found


def _found(model: type, at: Where, wrong: Collected) -> PredictSignature:
    predict = _placed(at, "predict", _method, model)
    hints = _placed(at, "predict", _hints, model, predict)
    parameters = tuple(
        wrong(_placed, at, f"predict.{name}", _parameter, model.__name__, each, hints.get(name))
        for name, each in list(inspect.signature(predict).parameters.items())[1:]
    )
    outputs, take, streams = _placed(at, "predict", _result, model, predict, hints)
    return PredictSignature(parameters, outputs, take, streams)


def _placed(at: Where, name: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a call returns; what it raises begins with the place of `name`."""
    try:
        return make(*args, **kwargs)
    except InvalidArgument as error:
        raise InvalidArgument(f"{at(name)}{error.message}") from error


def _hints(model: type, predict: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(predict, include_extras=True)
    except Exception as error:
        raise InvalidArgument(
            f"an annotation of '{model.__name__}.predict' cannot be read: {in_words(error)}"
        ) from error


def _result(
    model: type, predict: Callable[..., Any], hints: dict[str, Any]
) -> tuple[dict[str, TensorType], Callable[[Any], Mapping[str, Any]], bool]:
    """The outputs, what makes them of a result, and whether there are many results."""
    if "return" not in hints:
        raise InvalidArgument(f"'{model.__name__}.predict' does not say what it returns: {_HOW}")
    result = hints["return"]
    streams = typing.get_origin(result) in _ITERATORS and bool(typing.get_args(result))
    if streams:
        result = typing.get_args(result)[0]
    elif inspect.isgeneratorfunction(predict) or inspect.isasyncgenfunction(predict):
        kind = "AsyncIterator" if inspect.isasyncgenfunction(predict) else "Iterator"
        raise InvalidArgument(
            f"'{model.__name__}.predict' yields: say what, '-> {kind}[...]', and {_HOW}"
        )
    return *_outputs(model.__name__, result), streams


def _method(model: type) -> Callable[..., Any]:
    """The class's `predict`, which gets `self`."""
    predict = inspect.getattr_static(model, "predict", None)
    if predict is None:
        raise InvalidArgument(f"class '{model.__name__}' has no method 'predict'")
    if not inspect.isfunction(predict) or not inspect.signature(predict).parameters:
        raise InvalidArgument(
            f"'{model.__name__}.predict' must be an ordinary method, 'def predict(self, ...)'"
        )
    return predict


def as_config(signature: PredictSignature) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(`input`, `output`) of a model configuration."""
    inputs: list[dict[str, Any]] = []
    for parameter in signature.parameters:
        made = _tensor_config(parameter.name, parameter.type)
        if parameter.optional:
            made["optional"] = True
        inputs.append(made)
    return inputs, [_tensor_config(name, kind) for name, kind in signature.outputs.items()]


def _tensor_config(name: str, kind: TensorType) -> dict[str, Any]:
    return {"name": name, "data_type": TO_CONFIG[kind.datatype], "dims": list(kind.dims)}


def _parameter(owner: str, parameter: inspect.Parameter, hint: Any) -> Parameter:
    what = f"argument '{parameter.name}' of '{owner}.predict'"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise InvalidArgument(f"{what} takes any number of values: name each input")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise InvalidArgument(f"{what} must have a name to be given by: leave out the '/'")
    optional = parameter.default is not parameter.empty
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if len(options) == 1:
            hint = options[0]
    array, kind = _tensor(what, hint)
    numpy = array is np.ndarray or typing.get_origin(array) is np.ndarray
    return Parameter(parameter.name, kind, numpy or kind.datatype == "BYTES", optional)


def _outputs(
    owner: str, hint: Any
) -> tuple[dict[str, TensorType], Callable[[Any], Mapping[str, Any]]]:
    what = f"what '{owner}.predict' returns"
    if typing.get_origin(hint) is tuple:
        kinds = [_tensor(what, part)[1] for part in typing.get_args(hint)]
        names = [f"output_{at}" for at in range(len(kinds))]
        return dict(zip(names, kinds, strict=True)), lambda result: _zip(owner, names, result)
    record = typing.get_origin(hint) or hint  # of a generic class: the class
    keyed = typing.is_typeddict(record)
    if keyed or hasattr(record, "_fields") or dataclasses.is_dataclass(record):
        kinds_by_name = typing.get_type_hints(record, include_extras=True)
        if dataclasses.is_dataclass(record):  # not what is no field, as a ClassVar
            fields = dataclasses.fields(record)
            kinds_by_name = {field.name: kinds_by_name[field.name] for field in fields}
        outputs = {
            name: _tensor(f"'{name}' of {what}", kind)[1] for name, kind in kinds_by_name.items()
        }
        needed = record.__required_keys__ if keyed else frozenset(outputs)
        return outputs, lambda result: _record(owner, outputs, needed, result)
    return {"output": _tensor(what, hint)[1]}, lambda result: {"output": result}


def _zip(owner: str, names: list[str], result: Any) -> Mapping[str, Any]:
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        raise Internal(f"'{owner}.predict' did not return {len(names)} values, as it says it does")
    return dict(zip(names, result, strict=True))


def _record(
    owner: str, outputs: Mapping[str, TensorType], needed: frozenset[str], result: Any
) -> Mapping[str, Any]:
    """The outputs among the keys of a mapping, or among the attributes of another object."""
    if isinstance(result, Mapping):
        found = {name: result[name] for name in outputs if name in result}
    else:
        found = {name: getattr(result, name) for name in outputs if hasattr(result, name)}
    for name in outputs:
        if name in needed and name not in found:
            raise Internal(f"'{owner}.predict' did not return '{name}', as it says it does")
    return found


def _tensor(what: str, hint: Any) -> tuple[Any, TensorType]:
    if typing.get_origin(hint) in (typing.Required, typing.NotRequired):  # keys of a TypedDict
        (hint,) = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        array, *notes = typing.get_args(hint)
        for note in notes:
            if isinstance(note, TensorType):
                return array, note
    raise InvalidArgument(f"{what} is not a tensor: {_HOW}")
