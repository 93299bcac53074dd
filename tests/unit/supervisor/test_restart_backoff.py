"""When something that died is started again."""

from shmserve.supervisor.processes.children import RestartBackoff


def test_later_starts_wait_longer() -> None:
    row = RestartBackoff()
    pauses = [row.pause_s(0.0) for _ in range(12)]
    assert pauses[:2] == [0, 0] and all(pauses[2:]) and pauses == sorted(pauses)
    assert max(pauses) < 1


def test_a_long_life_resets_the_backoff() -> None:
    row = RestartBackoff()
    for _ in range(8):
        row.pause_s(1.0)
    assert row.pause_s(1.0) > 0 and row.pause_s(31.0) == 0 and row.pause_s(1.0) == 0
    assert row.pause_s(1.0) > 0


def test_a_worker_that_succeeds_in_between_has_a_short_backoff() -> None:
    """Not for nothing: to start it again and again would take a core from others."""
    row = RestartBackoff()
    pauses = []
    for _ in range(12):
        pauses.append(row.pause_s(1.0))
        row.record_work()
    assert pauses[:2] == [0, 0] and all(pauses[2:]) and max(pauses) <= 0.2
