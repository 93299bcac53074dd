"""Configurations of models with sequences."""

IDLE_TIME = "max_sequence_idle_microseconds: 60000000"


def control(name: str, kind: str, values: str) -> str:
    return f'{{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'


def controls(id_type: str = "TYPE_UINT64", pair: str = "") -> str:
    """Return all four control inputs; `pair` is the datatype of all but the id."""
    pairs = [pair] * 3 if pair else ["int32", "fp32", "bool"]
    controls = [
        control(kind, kind, f"{values}_false_true: [ {TRUTH[values]} ]")
        for kind, values in zip(("START", "END", "READY"), pairs, strict=True)
    ]
    controls.append(control("CORRID", "CORRID", f"data_type: {id_type}"))
    return f"control_input [ {', '.join(controls)} ]"


TRUTH = {"int32": "0, 1", "fp32": "0, 1", "bool": "false, true"}
CONTROL_INPUTS = controls()


def instances(count: int) -> str:
    return f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]"
