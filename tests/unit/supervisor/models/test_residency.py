"""Which models on demand leave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmserve.supervisor.models.residency import Resident, leaving

NAMES = "abcdefgh"


@st.composite
def residents(draw: st.DrawFn) -> list[Resident]:
    """Models, of which some are steps of those before them."""
    names = NAMES[: draw(st.integers(0, len(NAMES)))]
    return [
        Resident(
            name,
            byte_size=draw(st.integers(0, 5)),
            used_ns=draw(st.integers(0, 9)),
            stays=draw(st.booleans()),
            idle_ns=draw(st.sampled_from([0, 0, 4])),
            users=draw(st.frozensets(st.sampled_from(names[:place]), max_size=1))
            if place
            else frozenset(),
        )
        for place, name in enumerate(names)
    ]


BOUNDS = st.integers(0, 20)


@given(residents(), BOUNDS)
def test_nobody_leaves_who_stays_or_is_needed(models: list[Resident], bound: int) -> None:
    by_name = {each.name: each for each in models}
    gone: set[str] = set()
    for name in leaving(models, bound, 10):
        assert not by_name[name].stays
        assert by_name[name].users <= gone
        gone.add(name)


@given(residents(), BOUNDS)
def test_the_bound_holds_where_it_can_and_no_more_leave_than_must(
    models: list[Resident], bound: int
) -> None:
    names = leaving(models, bound, 10)
    gone: set[str] = set()
    here = {each.name: each for each in models}

    def over() -> bool:
        return bool(bound) and sum(each.byte_size for each in here.values()) > bound

    def idle(each: Resident) -> bool:
        return 0 < each.idle_ns <= 10 - each.used_ns

    def free() -> list[Resident]:
        return [each for each in here.values() if not each.stays and each.users <= gone]

    for name in names:
        assert over() or idle(here[name])
        if over():
            assert here[name].used_ns == min(each.used_ns for each in free())
        del here[name]
        gone.add(name)
    assert not (over() and free())
    assert not any(map(idle, free()))


def test_an_ensemble_leaves_with_its_steps_when_it_is_its_turn() -> None:
    models = [
        Resident("step", 4, used_ns=1, users=frozenset({"ensemble"})),
        Resident("ensemble", 0, used_ns=2),
        Resident("other", 4, used_ns=3),
    ]
    assert leaving(models, 8, 9) == []
    assert leaving(models, 7, 9) == ["ensemble", "step"]
    assert leaving(models, 3, 9) == ["ensemble", "step", "other"]
