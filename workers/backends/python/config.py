"""The configuration that `auto_complete_config` of a Python model completes."""

from __future__ import annotations

import json
from typing import Any

_WHERE = "in auto-complete-config function for model"


class ModelConfig:
    """A model's configuration, which may be extended but not contradicted.

    The constructor takes the configuration as JSON. The setters raise ValueError for a
    contradiction.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the current configuration, for reading."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the maximum batch size; the configuration may not contain a larger one."""
        written = self._model_config["max_batch_size"]
        if written > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {written}, but {_WHERE} "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable the dynamic batcher; the configuration may not choose another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but "
                    f"auto-complete-config function for model '{self._name}' tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set {"decoupled": bool}; the configuration may not contradict it."""
        if transaction_policy_dict.keys() - {"decoupled"}:
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = wanted

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002 - models may name it
        """Add {"name", "data_type", "dims", optionally "optional"}.

        An existing input must agree.
        """
        listed = "'name', 'data_type', 'dims' and 'optional'"
        self._add("input", input, {"name", "data_type", "dims", "optional"}, listed)

    def add_output(self, output: dict[str, Any]) -> None:
        """Add {"name", "data_type", "dims"}; an existing output must agree."""
        listed = "'name', 'data_type' and 'dims'"
        self._add("output", output, {"name", "data_type", "dims"}, listed)

    @property
    def _name(self) -> str:
        name: str = self._model_config["name"]
        return name

    def _check_properties(
        self, kind: str, tensor: dict[str, Any], allowed: set[str], listed: str
    ) -> None:
        if "name" not in tensor:
            raise ValueError(f"{kind} {_WHERE} '{self._name}' is missing 'name' property.")
        which = f"{kind} '{tensor['name']}' {_WHERE} '{self._name}'"
        if tensor.keys() - allowed:
            raise ValueError(f"{which} contains property other than {listed}.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{which} is missing '{key}' property.")

    def _add(self, kind: str, tensor: dict[str, Any], allowed: set[str], listed: str) -> None:
        self._check_properties(kind, tensor, allowed, listed)
        tensors: list[dict[str, Any]] = self._model_config[kind]
        for written in tensors:
            if written["name"] == tensor["name"]:
                self._check_agreement(kind, written, tensor)
                written.update(tensor)
                return
        tensors.append(tensor)

    def _check_agreement(self, kind: str, written: dict[str, Any], given: dict[str, Any]) -> None:
        if written["data_type"] not in ("TYPE_INVALID", given["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype "
                f"{written['data_type']} for {kind} '{given['name']}', model provides "
                f"{given['data_type']}"
            )
        for key in ("dims", "optional"):
            if key not in written or key not in given or (key == "dims" and not written[key]):
                continue
            if written[key] != given[key]:
                raise ValueError(
                    f"model '{self._name}', tensor '{given['name']}': the model expects {key} "
                    f"{given[key]} but the model configuration specifies {key} {written[key]}"
                )
