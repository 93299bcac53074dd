"""Scripts: models, and a sequence of events for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.repositories import DATATYPES


@dataclass(frozen=True)
class Model:
    """A model of a script.

    `method_body` is the body of `one(self, request)` in recorder.py; "" copies inputs to outputs.
    `config` is the model's config.pbtxt behind the name, `files` are further files of its folder.
    """

    name: str
    config: str
    method_body: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Send:
    """An arrival; the next step comes when it waits, executes or has been responded to.

    label: its request id. value: what its INT32 INPUT0, of shape [rows, columns], is full of; None
    for no such input. inputs: more of them, by name: datatype, shape and values. timeout_us: its
    timeout in the queue. outputs: those that it asks for, none for all. stream: over
    ModelStreamInfer.
    """

    label: str
    model: str
    value: int | None = 0
    rows: int = 1
    columns: int = 1
    inputs: Mapping[str, tuple[str, Sequence[int], Sequence[Any]]] = field(default_factory=dict)
    sequence: int | str = 0
    start: bool = False
    end: bool = False
    priority: int = 0
    timeout_us: int = 0
    outputs: Sequence[str] = ()
    stream: bool = False


@dataclass(frozen=True)
class Release:
    """Let the execution go on that this request is in."""

    label: str


@dataclass(frozen=True)
class Drain:
    """Let everything go on, until all have been responded to."""


@dataclass(frozen=True)
class Cancel:
    """The client of this request gives it up."""

    label: str


@dataclass(frozen=True)
class Responded:
    """Wait until this request has been responded to."""

    label: str


@dataclass(frozen=True)
class Elapse:
    """Let the timeouts that should expire pass."""

    seconds: float


Step = Send | Release | Drain | Cancel | Responded | Elapse


@dataclass(frozen=True)
class Known:
    """A difference that is meant: a pattern (fnmatch) of where, and why. differences.md has it.

    A difference that is not `always` there depends on the order in which models were loaded.
    """

    where: str
    reason: str
    always: bool = True


@dataclass(frozen=True)
class Script:
    """One scene.

    Each of the `known_differences` must occur (`Known.always`), or is to be removed. In `unordered`
    scenes several executions run at once in random order.
    """

    name: str
    models: Sequence[Model]
    steps: Sequence[Step]
    known_differences: Sequence[Known] = ()
    unordered: bool = False


@dataclass(frozen=True)
class Group:
    """Scripts that share one start of each server, with these variables and flags.

    Both servers know the flags. The names of all models are different.
    """

    name: str
    scripts: Sequence[Script]
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()


def tensor(
    name: str, datatype: str = "INT32", dims: Sequence[int] = (-1,), extra_fields: str = ""
) -> str:
    return (
        f'{{ name: "{name}" data_type: {DATATYPES[datatype]} dims: {list(dims)} {extra_fields} }}'
    )


def recorder(
    name: str,
    settings: str = "",
    *,
    inputs: Sequence[str] = (tensor("INPUT0"),),
    outputs: Sequence[str] = (tensor("OUTPUT0"),),
    max_batch_size: int = 8,
    instances: int = 1,
    method_body: str = "",
    files: Mapping[str, bytes] | None = None,
) -> Model:
    """Return a Python model that waits at the gate."""
    config = f"""
        backend: "python"
        max_batch_size: {max_batch_size}
        input [ {", ".join(inputs)} ]
        output [ {", ".join(outputs)} ]
        instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
        {settings}
    """
    return Model(name, config, method_body, files or {})
