"""The instance pool: announcements, registrations, exits, batches and limits in every order."""

import pytest

from shmserve.scheduler.batchers import CloseReason
from shmserve.scheduler.instances.pool import TRANSITIONS, Execution, LostWork, Pool, SlotState
from shmserve.scheduler.requests.scheduled import NEVER, NO_SUBMIT, Client, ScheduledRequest

NOW = 1_000_000
LIMIT = 500


@pytest.fixture
def pool() -> Pool:
    return Pool(0)


def execution(number: int = 1, started_ns: int = NOW) -> Execution:
    client = Client[ScheduledRequest](b"77.ab", print)
    request = ScheduledRequest(number, client, number, 1, b"", NOW, NOW, 0, 0, NEVER, NO_SUBMIT)
    return Execution(number, [request], CloseReason.IDLE, started_ns, started_ns)


def register_instance(pool: Pool, index: int = 0, pid: int = 100) -> bytes:
    peer = b"%d.%d" % (index, pid)
    pool.announce(index, pid)
    pool.register_worker(index, peer, pid)
    return peer


def counts(pool: Pool) -> dict[str, int]:
    """Return the number of instances by state, without zeros."""
    return {state: number for state, number in pool.counts().items() if number}


def test_an_instance_is_counted_once_announced_and_registered(pool: Pool) -> None:
    pool.announce(0, 100)
    assert not pool.free_slots and counts(pool) == {"expected": 1}
    pool.register_worker(0, b"0.100", 100)
    assert pool.free_slots and counts(pool) == {"idle": 1}


def test_an_offer_ahead_of_its_announcement_is_kept(pool: Pool) -> None:
    pool.register_worker(0, b"0.100", 100)
    assert not pool.free_slots
    pool.announce(0, 100)
    assert pool.free_slots


def test_a_successors_offer_ahead_of_the_exit_is_kept(pool: Pool) -> None:
    register_instance(pool)
    batch = execution()
    pool.assign(batch)
    pool.register_worker(0, b"0.101", 101)
    assert not pool.free_slots and pool.process_exited(100) == LostWork([batch], [])
    pool.announce(0, 101)
    assert pool.find_by_peer(b"0.101") is not None and pool.free_slots


def test_a_registration_of_an_exited_process_is_discarded(pool: Pool) -> None:
    pool.register_worker(0, b"0.100", 100)
    assert pool.process_exited(100) is None
    pool.announce(0, 100)
    assert not pool.free_slots


def test_only_announced_instances_are_registered() -> None:
    """Other workers that register are never accepted."""
    pool = Pool(0)
    pool.register_worker(0, b"0.500", 500)
    pool.announce(0, 0)
    pool.register_worker(0, b"0.500", 500)
    assert not pool.free_slots
    pool.announce(0, 100)
    pool.register_worker(0, b"0.501", 501)
    assert not pool.free_slots
    pool.register_worker(0, b"0.100", 100)
    assert pool.find_by_peer(b"0.100") is not None
    # A registration is also ignored after the accepted or the announced process has exited.
    pool.register_worker(0, b"0.502", 502)
    pool.process_exited(100)
    pool.announce(0, 0)
    assert not pool.free_slots
    pool.announce(0, 101)
    pool.process_exited(101)
    pool.register_worker(0, b"0.101", 101)
    assert not pool.free_slots


def test_repeated_offers_and_announcements_change_nothing(pool: Pool) -> None:
    peer = register_instance(pool)
    register_instance(pool)
    pool.assign(execution())
    register_instance(pool)
    assert not pool.free_slots and pool.find_by_peer(peer) is not None


def test_batches_go_to_the_longest_idle_instance(pool: Pool) -> None:
    first_worker, second_worker = register_instance(pool, 0, 100), register_instance(pool, 1, 101)
    slot = pool.assign(execution(1))
    assert slot.peer == first_worker
    pool.finish(slot, NOW)
    slot.requests.clear()
    assert pool.assign(execution(2)).peer == second_worker
    assert pool.assign(execution(3)).peer == first_worker
    assert not pool.free_slots and pool.executing_count == 2


def test_an_exit_returns_the_batch_and_frees_nothing(pool: Pool) -> None:
    peer = register_instance(pool)
    batch = execution()
    pool.assign(batch)
    assert pool.process_exited(999) is None
    assert pool.process_exited(100) == LostWork([batch], [])
    assert pool.process_exited(100) is None
    assert pool.find_by_peer(peer) is None and not pool.free_slots
    assert counts(pool) == {"expected": 1}


def test_an_idle_instance_that_exits_receives_no_more_batches(pool: Pool) -> None:
    register_instance(pool)
    assert pool.process_exited(100) == LostWork([], []) and not pool.free_slots


def test_a_doomed_instance_keeps_its_batch_and_gets_no_other(pool: Pool) -> None:
    register_instance(pool)
    slot = pool.assign(execution())
    slot.transition("doom")
    pool.finish(slot, NOW)
    assert not pool.free_slots and counts(pool) == {"doomed": 1}


def test_the_limit_counts_from_the_start_of_the_batch() -> None:
    pool = Pool(LIMIT)
    assert pool.due_ns == NEVER
    register_instance(pool)
    slot = pool.assign(execution(started_ns=NOW))
    assert pool.due_ns == NOW + LIMIT
    assert pool.overdue_slots(NOW + LIMIT - 1) == [] and pool.due_ns == NOW + LIMIT
    assert pool.overdue_slots(NOW + LIMIT) == [slot]
    slot.transition("doom")
    assert pool.overdue_slots(NOW + LIMIT) == [] and pool.due_ns == NEVER


def test_without_a_limit_no_batch_is_overdue(pool: Pool) -> None:
    register_instance(pool)
    pool.assign(execution(started_ns=0))
    assert pool.due_ns == NEVER


def test_a_pool_fails_while_it_has_no_instance(pool: Pool) -> None:
    assert pool.failure == ""
    register_instance(pool, 0, 100)
    register_instance(pool, 1, 101)
    pool.process_exited(100)
    pool.process_exited(101)
    assert pool.failure == "" and counts(pool) == {"expected": 2}
    pool.instance_failed(0, "broken")
    assert pool.failure == ""
    pool.instance_failed(1, "broken, too")
    assert pool.failure == "broken, too" and counts(pool) == {"gone": 2}
    pool.announce(0, 102)
    assert pool.failure == ""
    pool.instance_failed(0, "again")
    pool.announce(2, 103)
    pool.retire(2)
    assert pool.failure == "" and take_retired(pool) == [103]
    assert pool.failure == "again"


def test_requests_and_pids_are_found(pool: Pool) -> None:
    register_instance(pool)
    batch = execution()
    slot = pool.assign(batch)
    (request,) = batch.requests
    assert slot.requests == {request.key: request}
    assert request.worker == (b"0.100", 100)
    assert pool.find_by_pid(100) is slot and pool.find_by_pid(0) is None


@pytest.mark.parametrize("state", [SlotState.IDLE, SlotState.BUSY, SlotState.DOOMED])
def test_an_exit_makes_every_slot_expected(state: SlotState) -> None:
    assert TRANSITIONS[state]["exit"] is SlotState.EXPECTED


def test_a_busy_instance_takes_as_many_batches_as_its_credits() -> None:
    pool = Pool(LIMIT)
    register_instance(pool)
    assert not pool.least_busy(4), "an idle instance is no busy one"
    first_execution, second_execution = execution(1), execution(2, NOW)
    slot = pool.assign(first_execution)
    assert not pool.least_busy(1) and pool.least_busy(2)
    assert pool.assign(second_execution, pool.least_busy(2)) is slot and not pool.least_busy(2)
    assert slot.execution is first_execution and pool.executing_count == 2 and not pool.free_slots
    pool.finish(slot, NOW + 70)
    assert slot.execution is second_execution and slot.state is SlotState.BUSY
    assert not pool.free_slots
    assert second_execution.started_ns == NOW + 70, "its time begins when it is the first"
    pool.finish(slot, NOW + 90)
    assert slot.execution is None and pool.free_slots


def test_a_batch_ahead_is_sent_to_the_least_busy_instance(pool: Pool) -> None:
    register_instance(pool, 0, 100), register_instance(pool, 1, 101)
    slots = []
    for number in range(6):
        prefetch_slot = None if pool.free_slots else pool.least_busy(4)
        slots.append(pool.assign(execution(number), prefetch_slot).index)
    assert slots == [0, 1, 0, 1, 0, 1]


def test_an_exit_returns_the_running_batch_first(pool: Pool) -> None:
    register_instance(pool)
    batches = [execution(1), execution(2), execution(3)]
    for batch in batches:
        pool.assign(batch, pool.least_busy(4))
    assert pool.process_exited(100) == LostWork(batches, [])


def test_an_exit_returns_open_requests_separately(pool: Pool) -> None:
    register_instance(pool)
    first_execution, second_execution = execution(1), execution(2)
    pool.finish(pool.assign(first_execution), NOW)
    pool.assign(second_execution)
    assert pool.executing_count == 2
    assert pool.process_exited(100) == LostWork([second_execution], first_execution.requests)
    assert pool.executing_count == 0


def take_retired(pool: Pool) -> list[int]:
    return pool.take_retired(lambda slot: False)


def test_a_retiring_instance_finishes_its_work_and_receives_no_more(pool: Pool) -> None:
    peer = register_instance(pool)
    slot = pool.assign(execution())
    pool.retire(0)
    assert not pool.free_slots and not pool.least_busy(2) and take_retired(pool) == []
    pool.finish(slot, NOW)
    assert not pool.free_slots
    assert take_retired(pool) == []  # the open request of a decoupled model prevents the retirement
    slot.requests.clear()
    assert pool.take_retired(lambda slot: True) == []  # the open sequences prevent the retirement
    assert take_retired(pool) == [100]
    assert pool.find_by_peer(peer) is None and counts(pool) == {} and not pool.retiring_slots


def test_an_instance_that_retires_before_its_start_is_removed_at_once(pool: Pool) -> None:
    pool.announce(0, 100)
    pool.retire(0)
    pool.retire(1)
    assert take_retired(pool) == [100, 0] and counts(pool) == {}


def test_an_instance_that_exits_while_it_retires_is_removed(pool: Pool) -> None:
    register_instance(pool)
    batch = execution()
    pool.assign(batch)
    pool.retire(0)
    assert pool.process_exited(100) == LostWork([batch], [])
    assert not pool.retiring_slots and counts(pool) == {}
    pool.announce(0, 101)
    pool.register_worker(0, b"0.101", 101)
    assert pool.free_slots


def test_an_instance_at_its_request_limit_is_not_free() -> None:
    """Further requests of the decoupled model wait in the queue."""
    pool = Pool(0, None, 2)
    register_instance(pool)
    for batch in [execution(1), execution(2)]:
        slot = pool.assign(batch)
        pool.finish(slot, 0)
    assert len(slot.requests) == 2 and slot.is_idle
    assert not pool.free_slots and pool.least_busy(9) is None
    slot.requests.popitem()
    pool.update_free(slot)
    pool.update_free(slot)
    assert list(pool.free_slots) == [slot]


def test_an_offer_of_a_withdrawn_instance_is_dropped_with_its_process(pool: Pool) -> None:
    register_instance(pool, 0, 100)
    pool.announce(1, 101)
    pool.retire(1)
    assert pool.take_retired(lambda _: False) == [101]
    pool.register_worker(1, b"1.101", 101)
    pool.process_exited(101)
    assert pool.counts() == {"gone": 0, "expected": 0, "idle": 1, "busy": 0, "doomed": 0}
    assert not pool._registrations
