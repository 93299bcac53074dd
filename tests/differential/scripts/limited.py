"""The rate limiter: models that share resources, per device and global, and priorities."""

from tests.differential.script import (
    Drain,
    Group,
    Known,
    Model,
    Release,
    Script,
    Send,
    Step,
    recorder,
)


def needing(name: str, *resources: str, priority: int = 1, instances: int = 1) -> Model:
    """Return a model whose instances need resources, each NAME:COUNT or NAME:COUNT:global."""
    needed = []
    for description in resources:
        resource, count, *scope = description.split(":")
        needed.append(f'{{ name: "{resource}" count: {count} {"global: true" if scope else ""} }}')
    limits = f"rate_limiter {{ resources [ {', '.join(needed)} ] priority: {priority} }}"
    group = f"instance_group [ {{ kind: KIND_CPU count: {instances} {limits} }} ]"
    recording_model = recorder(name, "", instances=instances)
    lines = recording_model.config.splitlines()
    kept_lines = [line for line in lines if "instance_group" not in line]
    return Model(name, "\n".join([*kept_lines, group]), recording_model.method_body)


def models_take_turns(name: str, resource: str) -> Script:
    """Two models of which only one can execute at a time."""
    models = [needing(f"{name}_{n}", resource) for n in (1, 2)]
    steps: list[Step] = [Send("a", f"{name}_1", 1), Send("b", f"{name}_2", 2), Release("a")]
    return Script(name, models, [*steps, Release("b"), Drain()])


def room_for_two() -> Script:
    """As many models execute as there are resources for."""
    name = "room_for_two"
    models = [needing(f"{name}_{n}", "seats:1") for n in (1, 2, 3)]
    steps: list[Step] = [Send(f"r{n}", f"{name}_{n}", n) for n in (1, 2, 3)]
    return Script(name, models, [*steps, Release("r2"), Release("r3"), Drain()])


def own_instances() -> Script:
    """Two instances of one model with resources for one."""
    name = "own_instances"
    steps: list[Step] = [Send(f"r{n}", name, n) for n in (1, 2, 3)]
    return Script(name, [needing(name, "own:1", instances=2)], [*steps, Drain()])


def priorities() -> Script:
    """A model with priority 2 executes half as often as one with priority 1."""
    name = "priorities"
    models = [needing(f"{name}_{n}", "turns:1", priority=n) for n in (1, 2)]
    steps: list[Step] = [Send("first", f"{name}_1")]
    steps += [Send(f"a{n}", f"{name}_1", n) for n in range(4)]
    steps += [Send(f"b{n}", f"{name}_2", n) for n in range(4)]
    known = [
        Known("batches.*", "a new instance begins with the others' least product", always=False)
    ]
    return Script(name, models, [*steps, Drain()], known)


def much_and_little() -> Script:
    """A model that needs all of a resource waits, and a later one needs the free part."""
    name = "much_and_little"
    models = [needing(f"{name}_{n}", f"room:{n}") for n in (1, 2)]
    models.append(needing(f"{name}_3", "room:1"))
    steps: list[Step] = [Send(f"r{n}", f"{name}_{n}", n) for n in (1, 2, 3)]
    known = [Known("batches.*", "who needs much holds up nobody who needs what there is")]
    return Script(name, models, [*steps, Drain()], known)


def unlimited() -> Script:
    """An instance that needs no resource."""
    name = "unlimited"
    models = [needing(f"{name}_1", "some:1"), recorder(f"{name}_2")]
    steps: list[Step] = [Send("a", f"{name}_1", 1), Send("b", f"{name}_2", 2), Release("b")]
    return Script(name, models, [*steps, Drain()])


SCRIPTS = [
    models_take_turns("one_of_a_device", "of_device:1"),
    models_take_turns("one_of_all", "of_all:1:global"),
    own_instances(),
    priorities(),
    much_and_little(),
    unlimited(),
]
RATE_LIMIT_FLAG = "--rate-limit=execution_count"
GROUPS = [
    Group("limited", SCRIPTS, flags=[RATE_LIMIT_FLAG]),
    # If one resource's count is given, Triton knows no other resource.
    Group("counted", [room_for_two()], flags=[RATE_LIMIT_FLAG, "--rate-limit-resource=seats:2"]),
]
