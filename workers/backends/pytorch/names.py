"""The mapping of configured inputs and outputs to a model's arguments and results (pure).

    the argument's name       forward(self, image, mask)          "image", "mask"
    a position after "__"     any forward                         "INPUT__0", "OUTPUT__0"
    neither                   the order in the configuration      with a warning, like Triton

Results are mapped by key (dict), by field (named tuple, dataclass), or by position as above.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shmserve.errors import Internal, InvalidArgument

logger = logging.getLogger(__name__)

_INDEXED = re.compile(r".*__(\d+)")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a model's forward.

    Attributes:
        name: The name.
        required: Whether the argument has no default.
        by_name: Whether the argument is keyword-only.
        strings: Whether the argument is a list of strings.
    """

    name: str
    required: bool = True
    by_name: bool = False
    strings: bool = False


class ArgumentBinding:
    """The mapping of a configuration's inputs to the arguments of a call.

    If `arguments` is None, the model's arguments are unknown (`*args`), and inputs are mapped by
    position or order. `strings` are the inputs that are lists of strings.

    Raises:
        InvalidArgument: Inputs and arguments do not match.
    """

    def __init__(
        self, model: str, inputs: Sequence[str], arguments: Sequence[Argument] | None
    ) -> None:
        self._arguments = arguments
        if arguments is None:
            positions = _positions(model, "input", inputs, len(inputs))
        else:
            known = {argument.name: at for at, argument in enumerate(arguments)}
            if all(name in known for name in inputs):
                positions = [known[name] for name in inputs]
            else:
                self._check_count(model, inputs, arguments)
                positions = _positions(model, "input", inputs, len(arguments))
            missing = [
                argument.name
                for at, argument in enumerate(arguments)
                if argument.required and at not in positions
            ]
            if missing:
                raise InvalidArgument(
                    f"model '{model}' takes the argument(s) {_list(missing)}, but its "
                    f"configuration has no input for it; the inputs are {_list(inputs)}"
                )
        self.by_position = sorted(zip(positions, inputs, strict=True))
        self.strings = frozenset(
            name for at, name in self.by_position if arguments is not None and arguments[at].strings
        )

    @staticmethod
    def _check_count(model: str, inputs: Sequence[str], arguments: Sequence[Argument]) -> None:
        if len(inputs) > len(arguments):
            raise InvalidArgument(
                f"the configuration of model '{model}' has {len(inputs)} inputs, but its forward "
                f"takes {len(arguments)}: {_list([argument.name for argument in arguments])}"
            )

    def bind(self, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return (positional, keyword) arguments for the inputs of a request, without absent ones.

        Raises:
            InvalidArgument: An input is absent before another one, and the arguments have no names.
        """
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for position, name in self.by_position:
            if name not in given:
                continue
            known = None if self._arguments is None else self._arguments[position]
            if position == len(args) and not (known and known.by_name):
                args.append(given[name])
            elif known is None:
                raise InvalidArgument(
                    f"input '{name}' cannot be given without those before it: the model takes its "
                    "inputs by position"
                )
            else:
                kwargs[known.name] = given[name]
        return args, kwargs


class ResultBinding:
    """The mapping of a call's results to the outputs of a configuration.

    `count` is the number of the model's results, or None if it is known only at run time.

    Raises:
        InvalidArgument: The outputs do not match the count.
    """

    def __init__(self, model: str, outputs: Sequence[str], count: int | None = None) -> None:
        self._model = model
        self._outputs = tuple(outputs)
        if count is not None and len(outputs) > count:
            raise InvalidArgument(
                f"the configuration of model '{model}' has {len(outputs)} outputs, but the model "
                f"returns {count}"
            )
        limit = len(outputs) if count is None else count
        self._positions = _positions(model, "output", outputs, limit, strict=count is not None)

    def name(self, result: Any) -> dict[str, Any]:
        """Return the value of each output.

        Raises:
            Internal: The model's result does not match the configuration.
        """
        if isinstance(result, Mapping):
            return self._by_key(result)
        fields = getattr(result, "_fields", None)
        if fields is None and dataclasses.is_dataclass(result):
            fields = [field.name for field in dataclasses.fields(result)]
            result = [getattr(result, field) for field in fields]
        if fields and any(name in fields for name in self._outputs):
            # All outputs are then mapped by field: the order may differ.
            return self._by_key(dict(zip(fields, result, strict=True)))
        values = result if isinstance(result, (tuple, list)) else (result,)
        lost = [
            name
            for name, at in zip(self._outputs, self._positions, strict=True)
            if at >= len(values)
        ]
        if lost:
            raise Internal(
                f"model '{self._model}' returned {len(values)} output(s), which leaves none for "
                f"{_list(lost)}"
            )
        return {name: values[at] for name, at in zip(self._outputs, self._positions, strict=True)}

    def _by_key(self, result: Mapping[str, Any]) -> dict[str, Any]:
        lost = [name for name in self._outputs if name not in result]
        if lost:
            raise Internal(
                f"model '{self._model}' returned the output(s) {_list(list(map(str, result)))}, "
                f"but its configuration names {_list(lost)}"
            )
        return {name: result[name] for name in self._outputs}


def _positions(
    model: str, what: str, names: Sequence[str], limit: int, strict: bool = True
) -> list[int]:
    matches = [_INDEXED.fullmatch(name) for name in names]
    if names and all(matches):
        indices = [int(match[1]) for match in matches if match]
        for at, index in enumerate(indices):
            if index in indices[:at]:
                raise InvalidArgument(
                    f"{what}s '{names[indices.index(index)]}' and '{names[at]}' of model '{model}' "
                    "have the same index: the number after '__' is the position"
                )
            if strict and index >= limit:
                raise InvalidArgument(
                    f"{what} '{names[at]}' of model '{model}' has the index {index}, but the "
                    f"largest possible is {limit - 1}: the number after '__' is the position, "
                    "from 0"
                )
        return indices
    if len(names) > 1:
        logger.warning(
            "model '%s': %ss %s are neither the names the model has for them nor end in __INDEX, "
            "so the order in the configuration is taken",
            model,
            what,
            _list(names),
        )
    return list(range(len(names)))


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
