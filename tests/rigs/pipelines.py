"""Ensembles for tests, and the models of their steps, written on the spot."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.repositories import DATATYPES, python_model


def tensor(
    name: str, datatype: str = "FP32", dims: Sequence[int] = (-1,), extra_fields: str = ""
) -> str:
    return (
        f'{{ name: "{name}" data_type: {DATATYPES[datatype]} dims: {list(dims)} {extra_fields} }}'
    )


def add_model(
    repository: Path,
    name: str,
    method_body: str,
    inputs: Sequence[str] = (tensor("X"),),
    outputs: Sequence[str] = (tensor("Y"),),
    max_batch_size: int = 0,
    settings: str = "",
) -> None:
    """Add a Python model whose `one(self, request)` has this body, and further `settings`."""
    body = textwrap.indent(textwrap.dedent(method_body).strip("\n"), " " * 8)
    source = python_model(f"    def one(self, request):\n{body}")
    _write(
        repository,
        name,
        f"""
        backend: "python"
        max_batch_size: {max_batch_size}
        input [ {", ".join(inputs)} ]
        output [ {", ".join(outputs)} ]
        instance_group [ {{ kind: KIND_CPU }} ]
        {settings}
        """,
    )
    (repository / name / "1" / "model.py").write_text(source)


def step(
    model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1
) -> str:
    """Return a step of config.pbtxt, with maps from the model's names to the ensemble's."""
    maps = " ".join(
        f'{kind} {{ key: "{key}" value: "{value}" }}'
        for kind, items in (("input_map", inputs), ("output_map", outputs))
        for key, value in items.items()
    )
    return f'{{ model_name: "{model}" model_version: {version} {maps} }}'


def xy_step(model: str, source: str, target: str) -> str:
    """Return a step that reads tensor `source` as X and writes its output Y to `target`."""
    return step(model, {"X": source}, {"Y": target})


def add_ensemble(
    repository: Path,
    name: str,
    steps: Sequence[str],
    inputs: Sequence[str] = (tensor("IN"),),
    outputs: Sequence[str] = (tensor("OUT"),),
    max_batch_size: int = 0,
    scheduling: str = "",
    settings: str = "",
) -> None:
    _write(
        repository,
        name,
        f"""
        platform: "ensemble"
        max_batch_size: {max_batch_size}
        input [ {", ".join(inputs)} ]
        output [ {", ".join(outputs)} ]
        ensemble_scheduling {{ step [ {", ".join(steps)} ] {scheduling} }}
        {settings}
        """,
    )


def _write(repository: Path, name: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    text = f'name: "{name}"\n{textwrap.dedent(config)}'
    (repository / name / "config.pbtxt").write_text(text)
