"""What `instance_group` asks for, as worker processes."""

from __future__ import annotations

from typing import Any

from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.instances import bounds_of, expand_instances, sized


def group(name: str, kind: str, count: int, *gpus: int) -> dict[str, Any]:
    return {"name": name, "kind": kind, "count": count, "gpus": list(gpus)}


def test_one_instance_for_each_count_and_accelerator() -> None:
    """Names, kinds and devices as Triton tells them to a model's `initialize`."""
    config = {
        "instance_group": [
            group("m_0", "KIND_CPU", 2),
            group("m_1", "KIND_MODEL", 1),
            group("m_2", "KIND_GPU", 2, 0, 3),
        ]
    }
    found = [
        (i.index, i.name, i.kind, i.device, i.device_id)
        for i in expand_instances(ModelSpec.of(config))
    ]
    assert found == [
        (0, "m_0_0", "CPU", "cpu", 0),
        (1, "m_0_1", "CPU", "cpu", 0),
        (2, "m_1_0", "MODEL", "cpu", 0),
        (3, "m_2_gpu0_0", "GPU", "gpu:0", 0),
        (4, "m_2_gpu0_1", "GPU", "gpu:0", 0),
        (5, "m_2_gpu3_0", "GPU", "gpu:3", 3),
        (6, "m_2_gpu3_1", "GPU", "gpu:3", 3),
    ]


def bounded(count: int, *gpus: int, **bounds: str) -> ModelSpec:
    parameters = {name: {"string_value": text} for name, text in bounds.items()}
    kind = "KIND_GPU" if gpus else "KIND_CPU"
    return ModelSpec.of(
        {"instance_group": [group("m_0", kind, count, *gpus)], "parameters": parameters}
    )


def test_one_with_bounds_has_the_fewest_at_least() -> None:
    assert bounds_of(bounded(1)) is None
    assert bounds_of(bounded(1, max_instances="4")) == (1, 4)
    config = bounded(1, min_instances="3", max_instances="4")
    assert [i.name for i in expand_instances(config)] == ["m_0_0", "m_0_1", "m_0_2"]
    assert len(expand_instances(bounded(4, min_instances="3", max_instances="4"))) == 4


def test_one_with_bounds_has_as_many_as_run() -> None:
    """Whatever was written; up to the most, and those without bounds as many as are written."""
    for written, running, wanted in ((1, 3, 3), (1, 7, 4), (3, 2, 3), (2, 0, 2)):
        config = bounded(written, max_instances="4")
        assert len(expand_instances(config, running)) == wanted
    assert len(expand_instances(bounded(1), 3)) == 1


def test_so_many_evenly_on_the_devices() -> None:
    names = [i.name for i in expand_instances(sized(bounded(1, 0, 2), 3))]
    assert names == ["m_0_gpu0_0", "m_0_gpu0_1", "m_0_gpu2_0"]
    assert [i.name for i in expand_instances(sized(bounded(2, 0, 2), 1))] == ["m_0_gpu0_0"]
    assert len(expand_instances(sized(bounded(1), 2))) == 2
