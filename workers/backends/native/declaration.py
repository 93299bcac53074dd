"""The declaration of a native model: the annotations of its `predict`, and its class attributes.

`check_class` collects every problem of a class into one error.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import json
import logging
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from shmserve.errors import Collector, Internal, InvalidArgument, nearest
from shmserve.ipc.model_spec import (
    ENVIRONMENT,
    MAX_INSTANCES,
    MAX_STREAMS,
    MIN_INSTANCES,
    PADDING,
    STRATEGY_PARAMETER,
    TARGET_PARAMETER,
)
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.model import TensorType
from shmserve.workers.user_code import describe_error

P = ParamSpec("P")
T = TypeVar("T")

# The return types of a `predict` with any number of responses.
_ITERATORS = (
    *(collections.abc.Iterable, collections.abc.Iterator, collections.abc.AsyncIterable),
    *(collections.abc.Generator, collections.abc.AsyncIterator, collections.abc.AsyncGenerator),
)
# Returns a message's prefix for an attribute or "predict.ARGUMENT".
PositionPrefix = Callable[[str], str]
# Types that `predict` never receives: it receives arrays.
_VALUE_TYPES = (list, tuple, dict, str, bytes, int, float, bool)
_ANNOTATION_ADVICE = "annotate it like FP32[np.ndarray, 1, 8, 8], with FP32 from shmserve.model"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of `predict`.

    Attributes:
        is_numpy: Whether the parameter receives a numpy array.
        optional: Whether the parameter has a default, for requests without the input.
    """

    name: str
    type: TensorType
    is_numpy: bool
    optional: bool


@dataclass(frozen=True, slots=True)
class PredictSignature:
    """The arguments and outputs of `predict`.

    Attributes:
        parameters: The parameters after `self`, in order.
        outputs: The types of the outputs, by name.
        to_outputs: Converts a result, or a yielded value, to the arrays of the outputs by name.
        yields: Whether `predict` returns an iterator of responses.
    """

    parameters: tuple[Parameter, ...]
    outputs: dict[str, TensorType]
    to_outputs: Callable[[Any], Mapping[str, Any]]
    yields: bool


def no_position(name: str) -> str:
    """Return "", for a class whose positions in its file are unknown."""
    return ""


def read_signature(model: type, prefix_of: PositionPrefix = no_position) -> PredictSignature:
    """Return the signature of a class's `predict`.

    Raises:
        InvalidArgument: The class has no ordinary method `predict`, or an annotation is not a
            tensor type. The message has a line for each wrong argument.
    """
    collector = Collector()
    signature = collector(_collect_signature, model, prefix_of, collector)
    if collector.problems:
        raise InvalidArgument("\n".join(collector.problems))
    return signature


def _collect_signature(
    model: type, prefix_of: PositionPrefix, collector: Collector
) -> PredictSignature:
    predict = _with_position(prefix_of, "predict", _predict_method, model)
    hints = _with_position(prefix_of, "predict", _type_hints, model, predict)
    parameters = tuple(
        collector(
            _with_position,
            prefix_of,
            f"predict.{name}",
            _parameter,
            model.__name__,
            argument,
            hints.get(name),
        )
        for name, argument in list(inspect.signature(predict).parameters.items())[1:]
    )
    outputs, to_outputs, yields = _with_position(
        prefix_of, "predict", _declared_result, model, predict, hints
    )
    return PredictSignature(parameters, outputs, to_outputs, yields)


def _with_position(
    prefix: PositionPrefix, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function; prefix the text of its InvalidArgument with the position of `name`."""
    try:
        return function(*args, **kwargs)
    except InvalidArgument as error:
        raise InvalidArgument(f"{prefix(name)}{error.message}") from error


def adopt_forward(model: Any) -> None:
    """Give an `nn.Module` without `predict` a `predict` that calls the module.

    Raises:
        InvalidArgument: An annotation of `forward` is not a tensor type of the server; the message
            has the lines to add to the file.
    """
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(model, torch.nn.Module) or hasattr(model, "predict"):
        return

    @wraps(model.forward)
    def predict(module: Any, *inputs: Any, **kwargs: Any) -> Any:
        return module(*inputs, **kwargs)

    model.predict = predict
    try:
        read_signature(model)
    except InvalidArgument as error:
        names = list(inspect.signature(model.forward).parameters)[1:]
        parameter_list = ", ".join(f"{name}: FP32[torch.Tensor, -1]" for name in names)
        raise InvalidArgument(
            f"class '{model.__name__}' is an nn.Module, and its 'forward' is not annotated with "
            'tensors: write backend: "pytorch", runtime: "model.py", and the inputs and outputs '
            "into config.pbtxt, or three lines into the file, with your datatypes and shapes:\n"
            "    from shmserve.model import FP32\n"
            f"        def predict(self, {parameter_list}) -> FP32[torch.Tensor, -1]:\n"
            f"            return self({', '.join(names)})"
        ) from error


def _type_hints(model: type, predict: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(predict, include_extras=True)
    except Exception as error:
        raise InvalidArgument(
            f"an annotation of '{model.__name__}.predict' cannot be read: {describe_error(error)}"
        ) from error


def _declared_result(
    model: type, predict: Callable[..., Any], hints: dict[str, Any]
) -> tuple[dict[str, TensorType], Callable[[Any], Mapping[str, Any]], bool]:
    """Return the declared outputs of a `predict` function.

    Returns:
        The outputs by name, a function that maps a returned value to them, and whether there may
        be several responses.
    """
    if "return" not in hints:
        text = f"'{model.__name__}.predict' has no return annotation: {_ANNOTATION_ADVICE}"
        raise InvalidArgument(text)
    return_hint = hints["return"]
    yields = typing.get_origin(return_hint) in _ITERATORS and bool(typing.get_args(return_hint))
    if yields:
        return_hint = typing.get_args(return_hint)[0]
    elif inspect.isgeneratorfunction(predict) or inspect.isasyncgenfunction(predict):
        kind = "AsyncIterator" if inspect.isasyncgenfunction(predict) else "Iterator"
        raise InvalidArgument(
            f"'{model.__name__}.predict' yields: annotate it with '-> {kind}[...]', and "
            f"{_ANNOTATION_ADVICE}"
        )
    return *_convert_result_hint(model.__name__, return_hint), yields


def _predict_method(model: type) -> Callable[..., Any]:
    """Return the class's `predict`, a method with `self`."""
    predict = inspect.getattr_static(model, "predict", None)
    if predict is None:
        raise InvalidArgument(f"class '{model.__name__}' has no method 'predict(self, ...)'")
    if not inspect.isfunction(predict) or not inspect.signature(predict).parameters:
        text = f"'{model.__name__}.predict' must be an ordinary method, 'def predict(self, ...)'"
        raise InvalidArgument(text)
    return predict


def as_config(signature: PredictSignature) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the fields `input` and `output` of the model's configuration."""
    inputs: list[dict[str, Any]] = []
    for parameter in signature.parameters:
        tensor = _tensor_config(parameter.name, parameter.type)
        if parameter.optional:
            tensor["optional"] = True
        inputs.append(tensor)
    return inputs, [_tensor_config(name, tensor) for name, tensor in signature.outputs.items()]


def _tensor_config(name: str, tensor: TensorType) -> dict[str, Any]:
    return {"name": name, "data_type": TO_CONFIG[tensor.datatype], "dims": list(tensor.dims)}


def _parameter(owner: str, parameter: inspect.Parameter, hint: Any) -> Parameter:
    subject = f"argument '{parameter.name}' of '{owner}.predict'"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise InvalidArgument(f"{subject} is variadic; name each input")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise InvalidArgument(f"{subject} is positional-only; remove the '/'")
    optional = parameter.default is not parameter.empty
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        union_members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(union_members) == 1:
            hint = union_members[0]
    array_type, tensor = _tensor_type(subject, hint)
    is_numpy = array_type is np.ndarray or typing.get_origin(array_type) is np.ndarray
    return Parameter(parameter.name, tensor, is_numpy or tensor.datatype == "BYTES", optional)


def _convert_result_hint(
    owner: str, hint: Any
) -> tuple[dict[str, TensorType], Callable[[Any], Mapping[str, Any]]]:
    subject = f"the result of '{owner}.predict'"
    if typing.get_origin(hint) is tuple:
        tensor_types = [_tensor_type(subject, item_hint)[1] for item_hint in typing.get_args(hint)]
        names = [f"output_{index}" for index in range(len(tensor_types))]
        outputs = dict(zip(names, tensor_types, strict=True))
        return outputs, partial(_outputs_by_position, owner, names)
    record_type = typing.get_origin(hint) or hint  # the origin of a generic class
    is_typed_dict = typing.is_typeddict(record_type)
    if is_typed_dict or hasattr(record_type, "_fields") or dataclasses.is_dataclass(record_type):
        hints_by_name = typing.get_type_hints(record_type, include_extras=True)
        if dataclasses.is_dataclass(record_type):  # without ClassVar annotations
            fields = dataclasses.fields(record_type)
            hints_by_name = {field.name: hints_by_name[field.name] for field in fields}
        outputs = {
            name: _tensor_type(f"'{name}' of {subject}", field_hint)[1]
            for name, field_hint in hints_by_name.items()
        }
        required_fields = frozenset(outputs)
        if is_typed_dict:
            # `__required_keys__` ignores the markers of annotations that are strings.
            markers = {name: typing.get_origin(hint) for name, hint in hints_by_name.items()}
            required_fields = frozenset(
                name
                for name, marker in markers.items()
                if marker is typing.Required
                or (marker is not typing.NotRequired and name in record_type.__required_keys__)
            )
        return outputs, lambda result: _outputs_by_field(owner, outputs, required_fields, result)
    return {"output": _tensor_type(subject, hint)[1]}, lambda result: {"output": result}


def _outputs_by_position(owner: str, names: list[str], result: Any) -> Mapping[str, Any]:
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        found_text = len(result) if isinstance(result, (tuple, list)) else type(result).__name__
        raise Internal(f"'{owner}.predict' did not return {len(names)} values, but {found_text}")
    return dict(zip(names, result, strict=True))


def _outputs_by_field(
    owner: str, outputs: Mapping[str, TensorType], required_names: frozenset[str], result: Any
) -> Mapping[str, Any]:
    """Return the outputs of a result: a mapping, or an object with an attribute for each output."""
    if isinstance(result, Mapping):
        values = {name: result[name] for name in outputs if name in result}
    else:
        values = {name: getattr(result, name) for name in outputs if hasattr(result, name)}
    for name in sorted(required_names - values.keys()):
        found_text = list(result) if isinstance(result, Mapping) else type(result).__name__
        raise Internal(f"'{owner}.predict' did not return output '{name}' (found: {found_text})")
    return values


def _tensor_type(subject: str, hint: Any) -> tuple[Any, TensorType]:
    # A field of a TypedDict may be annotated as Required or NotRequired.
    if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
        (hint,) = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        array, *metadata = typing.get_args(hint)
        for item in metadata:
            if isinstance(item, TensorType):
                if array in _VALUE_TYPES or typing.get_origin(array) in _VALUE_TYPES:
                    raise InvalidArgument(
                        f"{subject} is annotated as {getattr(array, '__name__', array)}: "
                        f"{_ANNOTATION_ADVICE}, or with torch.Tensor instead of np.ndarray"
                    )
                return array, item
    raise InvalidArgument(f"{subject} is not a tensor: {_ANNOTATION_ADVICE}")


logger = logging.getLogger(__name__)

# The attributes of a class that the server interprets.
_KNOWN_ATTRIBUTES = (
    *("predict", "load", "unload", "is_ready", "max_batch_size", "max_queue_delay_us"),
    *(STRATEGY_PARAMETER, TARGET_PARAMETER, MAX_STREAMS, MIN_INSTANCES, MAX_INSTANCES, "instances"),
    *("instance_group", "ragged", "batch_input", "batch_output", PADDING, ENVIRONMENT),
    "sequence_batching",
)


# Attributes that set parameters of the configuration: their types, and the types' name in errors.
_PARAMETER_ATTRIBUTES: dict[str, tuple[tuple[type, ...], str]] = {
    STRATEGY_PARAMETER: ((str,), "a string"),
    TARGET_PARAMETER: ((int, float), "a number of milliseconds"),
    **dict.fromkeys((MIN_INSTANCES, MAX_INSTANCES), ((int,), "an integer")),
    PADDING: ((dict,), "a mapping with JSON values"),
    ENVIRONMENT: ((str,), "a string"),
}
# The arguments that a method is called with, and the advice if it has other parameters.
_METHOD_ARGUMENTS: dict[str, tuple[tuple[None, ...], str]] = {
    "__init__": ((), "use default values, or 'load(self, context)', whose context.parameters has "
        "the settings"),
    "load": ((None, None), "define it as 'load(self, context)'"),
    **dict.fromkeys(("unload", "is_ready"), ((None,), "'self' is the only argument")),
}  # fmt: skip
_INTEGER_ATTRIBUTES = ("max_batch_size", "max_queue_delay_us", MAX_STREAMS, "instances")


def check_class(model: type, prefix_of: PositionPrefix = no_position) -> PredictSignature:
    """Return the signature of a class's `predict`, after checking all attributes.

    Raises:
        InvalidArgument: The message has a line for each wrong attribute and argument. A line begins
            with `prefix_of(name)`.
    """
    checks: dict[str, Callable[[], Any]] = {
        **{name: partial(whole_number, model, name, 0) for name in _INTEGER_ATTRIBUTES},
        **{name: partial(parameter_text, model, name) for name in _PARAMETER_ATTRIBUTES},
        **{name: partial(batch_mappings, model, name) for name in ("batch_input", "batch_output")},
        "instance_group": partial(instance_groups, model),
        **{name: partial(_check_arguments, model, name) for name in _METHOD_ARGUMENTS},
    }
    collector = Collector()
    for name, check_attribute in checks.items():
        if getattr(model, name, None) is not None:
            collector(_with_position, prefix_of, name, check_attribute)
    predict = collector(read_signature, model, prefix_of)
    if collector.problems:
        raise InvalidArgument("\n".join(collector.problems))
    return predict


def _check_arguments(model: type, name: str) -> None:
    """Check that a method can be called with the arguments that the server passes."""
    arguments, advice = _METHOD_ARGUMENTS[name]
    method = model if name == "__init__" else inspect.getattr_static(model, name)
    if name != "__init__" and not inspect.isfunction(method):
        return
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        text = f"'{model.__name__}' is created without arguments, but __init__ is {error}"
        if name != "__init__":
            text = f"'{model.__name__}.{name}' cannot be called: {error}"
        raise InvalidArgument(f"{text}: {advice}") from None
    except ValueError:  # a class of an extension module may have no signature
        pass


def instance_groups(model: type) -> list[dict[str, Any]]:
    """Return the instance groups in a class's attribute `instance_group`, else in `instances`.

    Raises:
        InvalidArgument: An attribute has a wrong type.
    """
    count = whole_number(model, "instances", 0)
    groups = getattr(model, "instance_group", [{"count": count}] if count else [])
    if not isinstance(groups, list | tuple) or not all(isinstance(group, dict) for group in groups):
        raise InvalidArgument(
            f"'{model.__name__}.instance_group' must be a list of mappings with the keys of a "
            f"configuration ('count', 'kind', 'gpus'), got {groups!r}"
        )
    return [dict(group) for group in groups]


def warn_of_misspelt_attributes(model: type, prefix_of: PositionPrefix) -> None:
    """Log a warning for unknown attributes whose name resembles a known one."""
    for base_class in model.__mro__:
        members = vars(base_class) if base_class.__module__ == model.__module__ else {}
        for name in [name for name in members if name[:1] != "_" and name not in _KNOWN_ATTRIBUTES]:
            # Methods need a closer resemblance, because most methods are helpers of the class.
            similar_name = nearest(
                name, _KNOWN_ATTRIBUTES, 0.85 if callable(members[name]) else 0.75
            )
            if similar_name:
                logger.warning(
                    "%sthe attribute '%s.%s' is unknown; did you mean '%s'?",
                    prefix_of(name),
                    model.__name__,
                    name,
                    similar_name,
                )


def whole_number(model: type, attribute: str, default: int) -> int:
    """Return the value of an attribute that must be a whole number.

    Raises:
        InvalidArgument: The value is not a whole number.
    """
    value = getattr(model, attribute, default)
    if type(value) is not int or value < 0:
        text = f"'{model.__name__}.{attribute}' must be an integer >= 0, got {value!r}"
        raise InvalidArgument(text)
    return value


def client_inputs(
    model: type,
    inputs: list[dict[str, Any]],
    generated_inputs: frozenset[str],
    prefix_of: PositionPrefix,
) -> list[dict[str, Any]]:
    """Return the inputs that clients send, with `ragged` ones marked.

    Raises:
        InvalidArgument: `ragged` does not name inputs.
    """
    ragged_inputs = getattr(model, "ragged", ())
    names = {tensor["name"] for tensor in inputs} - generated_inputs
    is_list = isinstance(ragged_inputs, list | tuple | set | frozenset)
    if not is_list or not names.issuperset(ragged_inputs):
        raise InvalidArgument(
            f"{prefix_of('ragged')}'{model.__name__}.ragged' must be a list of input names "
            f"(allowed: {', '.join(sorted(names))}), got {ragged_inputs!r}"
        )
    client_tensors = [tensor for tensor in inputs if tensor["name"] not in generated_inputs]
    ragged_field = {"allow_ragged_batch": True}
    return [t | (ragged_field if t["name"] in ragged_inputs else {}) for t in client_tensors]


def batch_mappings(model: type, attribute: str) -> list[dict[str, Any]]:
    """Return the value of `batch_input` or `batch_output`.

    Raises:
        InvalidArgument: The value is not a list of mappings as in a configuration.
    """
    value = getattr(model, attribute)
    required_keys = {"target_name", "source_input"}
    if not isinstance(value, list | tuple) or not all(
        isinstance(mapping, dict)
        and required_keys <= mapping.keys()
        and all(isinstance(mapping[field], list | tuple) for field in required_keys)
        for mapping in value
    ):
        raise InvalidArgument(
            f"'{model.__name__}.{attribute}' must be a list of mappings with the keys of a "
            "configuration: 'kind', and the lists 'target_name' and 'source_input', "
            f"got {value!r}"
        )
    return [dict(mapping) for mapping in value]


def parameters(model: type) -> dict[str, Any]:
    """Return the configuration's parameters that attributes of a class set, by name."""
    parameters = {name: parameter_text(model, name) for name in _PARAMETER_ATTRIBUTES}
    return {name: {"string_value": text} for name, text in parameters.items() if text is not None}


def parameter_text(model: type, name: str) -> str | None:
    """Return the text of a parameter, or None if the class does not have it.

    Raises:
        InvalidArgument: The attribute has a wrong type.
    """
    value = getattr(model, name, None)
    allowed_types, allowed_text = _PARAMETER_ATTRIBUTES[name]
    if value is None:
        return None
    if type(value) not in allowed_types:
        raise InvalidArgument(f"'{model.__name__}.{name}' must be {allowed_text}, got {value!r}")
    try:
        return json.dumps(value) if allowed_types == (dict,) else str(value)
    except TypeError as error:
        text = f"'{model.__name__}.{name}' must be {allowed_text}: {error}"
        raise InvalidArgument(text) from None
