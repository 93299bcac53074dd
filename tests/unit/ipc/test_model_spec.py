"""The dataclasses of a configuration have the fields and names of config.pbtxt."""

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.ipc.class_source import served_class
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.model_config import from_json, to_dict
from shmserve.proto.model_config_pb2 import ModelConfig


def _records(kind: Any) -> Iterator[type[Any]]:
    if isinstance(kind, type) and is_dataclass(kind):
        yield kind
    for member in typing.get_args(kind):
        yield from _records(member)


def _unknown(cls: type[Any], message: Any) -> Iterator[str]:
    """Yield the paths of fields that a message of the schema does not have."""
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        path = field.metadata.get("path", field.name)
        encoded_value: Any = message
        for name in path.split("."):
            if encoded_value is None or name not in encoded_value.fields_by_name:
                yield f"{cls.__name__}.{path}"
                break
            encoded_value = encoded_value.fields_by_name[name].message_type
            if encoded_value is not None and encoded_value.GetOptions().map_entry:
                encoded_value = encoded_value.fields_by_name["value"].message_type
        else:
            for record in _records(hints[field.name]):
                if encoded_value is not None and record.__name__ != "ExecutionAccelerator":
                    yield from _unknown(record, encoded_value)


# Records that represent two protobuf messages each, and the fields that only one of the two has.
_OF_ONE = {
    "TensorSpec": ("optional", "allow_ragged_batch"),  # only inputs have these fields
    "BatchTensor": ("data_type",),  # only batch_input has this field
    "DynamicBatching": (
        "priority_levels",
        "default_priority_level",
        "default_queue_policy",
        "priority_queue_policy",
        "max_candidate_sequences",  # only the strategy "oldest" has this field
    ),
    "ModelSpec": ("source",),
}


def test_every_field_exists_in_the_schema() -> None:
    assert set(_unknown(ModelSpec, ModelConfig.DESCRIPTOR)) == {
        f"{record}.{path}" for record, paths in _OF_ONE.items() for path in paths
    }


def test_a_configuration_is_read_at_every_depth() -> None:
    fields = {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, -1],
            "allow_ragged_batch": True}],
        "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [1],
            "reshape": {"shape": []}}],
        "dynamic_batching": {"priority_levels": 2,
            "priority_queue_policy": {"2": {"max_queue_size": 7}}},
        "optimization": {"cuda": {"graphs": True, "graph_spec": [{"batch_size": 4}]}},
        "parameters": {"a": {"string_value": "b"}},
        "model_transaction_policy": {"decoupled": True},
        "response_cache": {"enable": True},
    }  # fmt: skip
    source = to_dict(from_json(fields))
    config = ModelSpec.of(source)
    assert config.input == (TensorSpec("x", "FP32", (1, -1), ragged=True),)
    assert (config.output[0].reshape, config.output[0].model_dims) == ((), ())
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.priority_queue_policy[2].max_queue_size == 7
    assert [spec.batch_size for spec in config.optimization.cuda_graph_spec] == [4]
    assert config.parameters == {"a": "b"} and config.decoupled and config.caches_responses
    assert config.source == source and "instance_group" not in config.immutable_config


PREDICT_METHOD = "    def predict(self, x): ...\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"class Whatever:\n{PREDICT_METHOD}", "Whatever"),
        (f"@dataclass\nclass A(Generic[T]):\n    async {PREDICT_METHOD.strip()}\n", "A"),
        (f"class Base:\n{PREDICT_METHOD}\nclass Mine(Base):\n    size = 1\n", "Mine"),
        (f"class Out(NamedTuple):\n    y: int\nclass Mine:\n{PREDICT_METHOD}", "Mine"),
        (f"class Net(nn.Module):\n    pass\nclass Mine:\n{PREDICT_METHOD}", "Mine"),
        (f"class A:\n{PREDICT_METHOD}\nclass Model:\n{PREDICT_METHOD}", "Model"),
        (f"class A:\n{PREDICT_METHOD}\nclass B:\n    a = A\n{PREDICT_METHOD}", "B"),
        ("class Block(nn.Module):\n    pass\nclass Net(nn.Module):\n    block = Block()\n", "Net"),
        ("from library import Base\nclass Mine(Base):\n    pass\n", "Mine"),
        ("from library import Net as Model\n", "Model"),
        ("Model = make()\n", "Model"),
        (f"class TritonPythonModel:\n    pass\nclass A:\n{PREDICT_METHOD}", ""),
        (f"from a import TritonPythonModel\nclass A:\n{PREDICT_METHOD}", ""),
        (f"if a:\n    class TritonPythonModel: ...\nclass A:\n{PREDICT_METHOD}", ""),
        ("class Mine:\n    def execute(self, requests): ...\n", ""),
        ("class A(nn.Module): ...\nclass B(nn.Module): ...\n", ""),
        ("from library import *\nclass Helper(nn.Module): ...\n", ""),
        (f"from library import *\nclass Mine:\n{PREDICT_METHOD}", "Mine"),
        ("x = (\n", ""),
    ],
)
def test_the_class_of_a_file_that_is_served(text: str, name: str) -> None:
    assert served_class(text) == name


def test_several_classes_need_a_choice() -> None:
    with pytest.raises(InvalidArgument, match=r'classes A, B have .* string_value: "A"'):
        served_class(f"class A:\n{PREDICT_METHOD}\nclass B:\n{PREDICT_METHOD}")
