"""The trials of the adaptive batcher, and the misses that they may cause."""

from dataclasses import replace

import pytest

from shmserve.scheduler.batchers.adaptive import MissBudget, SizeTrials, TrialState, WaitingChoice
from shmserve.scheduler.batchers.estimates import Load
from tests.rigs.batching_simulation import MS

# A row takes at least 2.5 ms, a row arrives every 4 ms, and the target is 80 ms.
TRIAL_STATE = TrialState(75.0 * MS, 30.0 * MS, 2.5 * MS, 0.25 / MS, 1000.0, is_overloaded=False)


def settled_account() -> MissBudget:
    """Return an account after the learning period."""
    account = MissBudget()
    account.end_learning()
    return account


def test_a_trial_that_cannot_be_late_costs_nothing() -> None:
    account = settled_account()
    account.subtract_misses(1000)
    assert SizeTrials(account).start_trial(9, 50 * MS, TRIAL_STATE, 100)
    assert not SizeTrials(account).start_trial(9, 100 * MS, TRIAL_STATE, 100)


def test_the_estimate_counts_late_requests_in_and_behind_the_trial() -> None:
    """9 late in the trial of 100 ms; 47.5 ms lost, 0.25/ms arrive, 3/8 idle: 32 late after it."""
    for credit, is_allowed in ((40.0, False), (42.0, True)):
        account = MissBudget()
        account.credit = credit
        assert SizeTrials(account).start_trial(9, 100 * MS, TRIAL_STATE, 100) is is_allowed


def test_at_most_all_waiting_clients_are_late() -> None:
    account = settled_account()
    assert not SizeTrials(account).start_trial(9, 100 * MS, TRIAL_STATE, 100)
    assert SizeTrials(account).start_trial(
        9, 100 * MS, replace(TRIAL_STATE, max_in_flight=12.0), 100
    )


def test_a_necessary_trial_runs_at_any_number_of_misses() -> None:
    sizes = SizeTrials(settled_account())
    assert sizes.start_trial(32, 1000 * MS, replace(TRIAL_STATE, is_overloaded=True), 100)
    assert not sizes.is_due(101) and sizes.is_due(102)


def test_sizes_are_tried_seldom_once_there_was_time_to_learn() -> None:
    sizes = SizeTrials(settled_account())
    assert sizes.start_trial(9, 50 * MS, TRIAL_STATE, 100)
    assert not sizes.is_due(115) and sizes.is_due(116)


def test_a_trial_costs_exactly_its_own_misses() -> None:
    account = settled_account()
    credit_before, sizes = account.credit, SizeTrials(account)
    assert sizes.start_trial(9, 50 * MS, TRIAL_STATE, 100)
    sizes.record_batch(9, 100 * MS, 9, 25, 9)
    sizes.record_batch(8, 20 * MS, 8, 22, 8)
    assert account.credit == credit_before - 17
    assert account.subtract_trial_misses(9) == 0 and account.subtract_trial_misses(10) == 2
    # Misses long after a trial are not charged to it.
    for _ in range(20):
        sizes.record_batch(8, 20 * MS, 8, 8, 0)
    sizes.record_batch(8, 20 * MS, 8, 8, 8)
    assert account.credit == credit_before - 17 and account.subtract_trial_misses(8) == 8


def test_a_fifth_of_the_misses_that_the_target_allows_is_earned() -> None:
    account = settled_account()
    account.subtract_misses(20)
    credit_before = account.credit
    for _ in range(100):
        account.add_credit(50)
    assert account.credit == pytest.approx(credit_before + 5000 / 100 / 5)
    for _ in range(10_000):
        account.add_credit(50)
    assert account.credit < 25


def test_the_alternative_is_not_tried_before_its_misses_are_earned() -> None:
    choice, alternative_count = WaitingChoice(settled_account()), 0
    for _ in range(20_000):
        late_count = 0 if choice.should_wait else 4
        alternative_count += not choice.should_wait
        choice.record_batch([MS if choice.should_wait else 2 * MS] * 4, late_count)
    assert choice.should_wait and choice.waiting_clearly_pays
    assert alternative_count < 48  # number of batches; no misses were earned


def test_the_load_of_each_of_several_instances() -> None:
    """Three instances complete 8 requests of 2 rows in 24 ms each."""
    load, now_ns = Load(), 0
    for _ in range(400):
        now_ns += 8 * MS
        load.record_batch(now_ns, 24, 8, 16, 24 * MS)
    assert load.rows_per_ns == pytest.approx(16 / 24 / MS, rel=0.05)
    assert load.waiting_rows == pytest.approx(16, rel=0.05)
    assert load.row_interval_ns == pytest.approx(MS / 2, rel=0.05) and load.is_steady
