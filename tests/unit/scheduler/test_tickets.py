"""A scheduler under the rate limiter: an instance executes only with a ticket."""

from typing import Any

from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.inference import Cancel
from shmserve.ipc.messages.publications import ProcessExited
from tests.rigs.scheduler_rig import MS, Rig, ready_rig

ADAPTIVE_BATCHING = {"batching_strategy": "adaptive", "target_p99_ms": "2000"}


def take_messages(rig: Rig) -> list[Any]:
    kinds = (m.AskTicket, m.TicketReturned)
    return [message for _, message in rig.control.take() if isinstance(message, kinds)]


def limited_rig(batching: dict[str, Any] | None = None, instances: int = 1, **more: Any) -> Rig:
    rig = Rig(batching, rate_limited=True, **more)
    for index in range(instances):
        rig.start(index, 100 + index)
    return rig


def test_an_execution_waits_for_its_ticket_and_returns_it() -> None:
    rig = limited_rig({})
    rig.submit()
    assert (take_messages(rig), rig.take_batches()) == ([m.AskTicket(1, 0)], [])
    rig.submit(2)  # the batch grows while it waits for the ticket
    assert take_messages(rig) == []
    rig.supervisor(m.TicketGranted(1))
    peer, batch = rig.execute()
    assert len(batch.requests) == 3
    rig.finish(peer, batch)
    assert take_messages(rig) == [m.TicketReturned(1, True)]


def test_the_next_ticket_is_requested_before_the_old_one_is_returned() -> None:
    """If the old ticket were returned first, a waiting model would always be next."""
    rig = limited_rig()
    rig.submit(2)
    rig.supervisor(m.TicketGranted(1))
    peer, batch = rig.execute()
    take_messages(rig)
    rig.finish(peer, batch)
    assert take_messages(rig) == [m.AskTicket(2, 0), m.TicketReturned(1, True)]


def test_no_ticket_is_requested_without_a_request() -> None:
    assert take_messages(limited_rig({}, 3)) == []


def test_as_many_tickets_are_requested_as_batches_can_run() -> None:
    rig = limited_rig(None, 3)
    rig.submit(2)
    assert take_messages(rig) == [m.AskTicket(1, 0), m.AskTicket(2, 1)]
    rig.supervisor(m.TicketGranted(2))
    assert rig.execute()[0] == b"1.101"


def test_no_ticket_is_held_while_a_batch_is_delayed() -> None:
    rig = limited_rig({"max_queue_delay_microseconds": 1000})
    rig.submit()
    assert take_messages(rig) == []
    rig.pass_time(2 * MS)
    assert take_messages(rig) == [m.AskTicket(1, 0)]


def test_a_late_ticket_does_not_restart_the_adaptive_wait() -> None:
    """The batcher decides again at each arrival and at the ticket."""
    rig = limited_rig({}, max_batch_size=64, parameters=ADAPTIVE_BATCHING)

    def grant_ticket() -> None:
        requests = [message for message in take_messages(rig) if isinstance(message, m.AskTicket)]
        rig.supervisor(*[m.TicketGranted(message.ticket) for message in requests])

    for _ in range(60):  # bursts of 8 requests at intervals of 2 ms; a batch takes 60 ms
        for _ in range(8):
            rig.pass_time(2 * MS)
            rig.submit()
        while rig.core.live_count:
            grant_ticket()
            for peer, batch in rig.take_batches():
                rig.pass_time(60 * MS)
                rig.finish(peer, batch)
    rig.core._dispatcher._batcher._waiting_choice.waits = True  # type: ignore[attr-defined]
    take_messages(rig)
    start_ns = rig.now
    last_id = rig.submit(2)[1]
    requests: list[Any] = []
    while not requests:  # more requests seem to be in transit, because other requests are cancelled
        rig.pass_time(2 * MS)
        (new_id,) = rig.submit()
        rig.client(Cancel(last_id))
        last_id, requests = new_id, take_messages(rig)
    assert 10 * MS < rig.now - start_ns <= 62 * MS
    for _ in range(5):  # the ticket is granted late
        rig.pass_time(2 * MS)
        (new_id,) = rig.submit()
        rig.client(Cancel(last_id))
        last_id = new_id
        assert take_messages(rig) == []
    rig.supervisor(m.TicketGranted(requests[0].ticket))
    assert len(rig.take_batches()) == 1


def test_an_unneeded_ticket_is_returned() -> None:
    rig = limited_rig()
    (number,) = rig.submit()
    rig.client(Cancel(number))
    rig.supervisor(m.TicketGranted(1))
    assert take_messages(rig) == [m.AskTicket(1, 0), m.TicketReturned(1, False)]


def test_tickets_of_an_exited_worker_are_returned() -> None:
    rig = limited_rig(None, 2)
    rig.submit()
    rig.supervisor(m.TicketGranted(1))
    rig.execute()
    take_messages(rig)
    rig.supervisor(ProcessExited(100, "signal 9"))
    # The request is retried with a new ticket.
    assert take_messages(rig) == [m.TicketReturned(1, True), m.AskTicket(2, 1)]
    rig.supervisor(m.TicketGranted(2))
    assert rig.execute()[0] == b"1.101"


def test_a_ticket_for_an_exited_process_is_returned() -> None:
    rig = limited_rig()
    rig.submit()
    rig.supervisor(ProcessExited(100, "signal 9"), m.TicketGranted(1))
    assert take_messages(rig) == [m.AskTicket(1, 0), m.TicketReturned(1, False)]
    rig.start(0, 105)
    assert take_messages(rig) == [m.AskTicket(2, 0)]


def test_sequences_ask_for_the_instance_of_their_slot() -> None:
    rig = limited_rig(None, 2, max_batch_size=1, sequences={"direct": {}})
    rig.submit(correlation_id=1, flags=1)
    rig.submit(correlation_id=2, flags=1)
    assert take_messages(rig) == [m.AskTicket(1, 0), m.AskTicket(2, 1)]
    rig.supervisor(m.TicketGranted(2))
    assert rig.execute()[0] == b"1.101"
    rig.supervisor(m.TicketGranted(1))
    assert rig.execute()[0] == b"0.100"


def test_without_the_limiter_no_tickets_are_requested() -> None:
    rig, _ = ready_rig()
    rig.submit()
    rig.execute()
    assert take_messages(rig) == []
