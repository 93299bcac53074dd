"""The unnumbered rules of the schedulers and the tests of each."""

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[3]

FILES = {
    "TABLE": "unit/scheduler/sequence/test_sequences.py",
    "MANY": "unit/scheduler/sequence/test_never_ended.py",
    "STRATEGIES": "unit/scheduler/sequence/test_strategies.py",
    "WORKER": "unit/workers/test_sequences.py",
    "WORKED": "integration/models/test_sequences_worked.py",
    "ENDING": "integration/models/test_open_sequences.py",
    "STATES": "integration/models/test_implicit_state.py",
    "SEQUENCES": "integration/models/test_sequences.py",
    "SHAPES": "unit/ipc/test_shape_keys.py",
    "RAGGED": "unit/workers/test_ragged.py",
    "RAGGED_SERVED": "integration/models/test_ragged.py",
    "CONFIG": "unit/model_config/test_composition.py",
    "RULES": "unit/model_config/test_rules.py",
    "GRAPH": "unit/model_config/test_ensemble_graph.py",
    "ENSEMBLE": "unit/scheduler/ensemble/test_core.py",
    "FLOW": "unit/scheduler/ensemble/test_flow.py",
    "OUTPUTS": "unit/scheduler/ensemble/test_step_outputs.py",
    "SERVED": "integration/ensembles/test_ensembles.py",
    "WHOLE": "integration/ensembles/test_whole_requests.py",
    "PYTHON": "unit/workers/test_python_backend.py",
}

# For each bullet: its section and position, its text, and on the next lines its tests (FILE, then
# the name).
BULLETS = """
3.3.1 an id is a number that is not 0 or a text that is not empty; the two are never the same
    TABLE test_3_3_an_id_is_needed
    TABLE test_3_3_a_number_and_a_text_are_different_ids
3.3.2 a request has batch size 1
    TABLE test_3_3_batch_size_must_be_one
3.3.3 the first of an id needs START
    TABLE test_3_3_the_first_needs_start
3.3.4 slots an instance: the batch size or the candidates; the lowest free one of all
    STRATEGIES test_3_4_rows_are_slots_up_to_the_highest_with_a_request
    STRATEGIES test_3_5_slots_number_the_candidates_or_the_batch
    STRATEGIES test_3_5_without_batching
    TABLE test_3_3_slots_by_their_number_over_all_instances
3.3.5 START on a live id begins anew in its slot; END frees the id when it is queued
    TABLE test_3_3_a_start_on_a_live_id_restarts_in_its_slot
    TABLE test_3_3_an_id_that_has_ended_may_start_while_its_end_runs
3.3.6 the backlog is first in, first out; a whole one stays a unit, and its id may come again
    TABLE test_3_3_the_backlog_is_first_in_first_out
    TABLE test_3_3_an_ended_sequence_in_the_backlog_may_be_restarted
3.3.7 an idle one loses its slot, without an END for the model; not those in the backlog
    TABLE test_3_3_an_idle_sequence_is_evicted_without_a_call_of_the_model
    TABLE test_3_3_running_and_waiting_sequences_are_not_idle
    TABLE test_3_3_the_default_idle_time_is_a_second_and_the_backlog_waits
    MANY test_many_sequences_run_once_and_are_removed
3.3.8 a timeout holds in the backlog, for the whole sequence
    TABLE test_3_3_a_timeout_in_the_backlog_rejects_the_whole_sequence
3.3.9 shutdown refuses START alone; what runs may finish
    TABLE test_3_3_a_drain_refuses_only_new_sequences
    ENDING test_3_3_a_server_that_ends_waits_for_open_sequences
    ENDING test_3_3_a_drain_waits_at_most_for_the_idle_time
3.3.10 controls: pairs of three types, ids of five; READY is false in null rows alone
    WORKER test_3_3_pairs
    WORKER test_3_3_ids_are_cut_to_their_low_bytes
    WORKER test_3_3_ids_that_are_texts
    TABLE test_3_3_the_kind_of_an_id_must_be_the_controls
    SEQUENCES test_3_3_correlation_ids_of_every_datatype
    CONFIG test_sequences_are_checked
3.3.11 what a step says of its sequence holds for the steps behind it
    WHOLE test_sequence_parameters_of_a_step_hold_for_later_steps
3.4.1 a row a slot, up to the highest with a request; null rows for those without
    STRATEGIES test_3_4_rows_are_slots_up_to_the_highest_with_a_request
    STRATEGIES test_3_4_the_longest_waiting_request_sets_the_shape
    STRATEGIES test_3_4_null_rows_are_no_inferences_but_rows_of_a_batch
    WORKED test_direct_strategy_with_requests_beside_an_idle_sequence
3.4.2 the next batch is made when the last has returned
    STRATEGIES test_3_4_the_next_batch_is_made_when_the_last_has_returned
3.4.3 delay and minimum utilization hold only together
    STRATEGIES test_3_4_delay_and_minimum_utilization_only_together
    STRATEGIES test_3_4_enough_slots_end_the_wait_and_so_does_a_deadline
3.4.4 END frees the slot when it is put into a batch
    STRATEGIES test_the_worked_example_of_two_instances_with_two_slots
3.4.5 a cancelled front request takes those behind it along, and the slot is free
    TABLE test_3_10_cancelling_a_request_cancels_later_ones_of_its_sequence
3.5.1 a dynamic batcher an instance, at most one request of a sequence at a time, no null rows
    STRATEGIES test_3_5_the_batches_are_the_dynamic_batchers
    STRATEGIES test_3_5_at_most_one_request_of_a_sequence_runs
    STRATEGIES test_3_5_oldest_has_no_null_rows_and_passes_the_slot_of_the_state
    STRATEGIES test_the_worked_example
3.5.2 implicit state: reset at START, zeros or a file, kept where it is not given back
    WORKER test_3_5_a_state_begins_with_zero_at_each_start
    WORKER test_3_5_initial_states_come_from_a_file_or_zeros
    WORKER test_3_5_invalid_initial_state_files_are_refused
    WORKER test_3_5_missing_and_failed_updates_keep_the_state
    WORKER test_3_5_a_state_has_the_shape_and_datatype_of_the_last_output
    WORKER test_3_5_state_outputs_are_returned_only_if_they_are_outputs
    STATES test_3_5_states_of_a_batch_stay_apart
    STATES test_3_5_variable_dimensions
    CONFIG test_sequences_are_checked
    TABLE test_3_5_after_a_cancellation_the_next_start_is_a_new_sequence
3.5.3 iterative_sequence: an id of its own, asked for again without flags, refused elsewhere
    TABLE test_3_5_iterative_requests_have_an_id_and_are_rescheduled
    TABLE test_3_5_iterative_and_decoupled
    SEQUENCES test_3_5_an_iterative_sequence_that_streams
    PYTHON test_rescheduling_is_refused
3.6.1 ragged inputs are not compared; one flat tensor, or for a Python model each its own
    SHAPES test_ragged_inputs_are_not_compared
    RAGGED_SERVED test_a_torch_model_gets_one_flat_batch
    RAGGED_SERVED test_a_python_model_gets_each_requests_own_tensor
3.6.2 the six kinds of batch_input, and batch_output
    RAGGED test_batch_input_kinds
    RAGGED test_item_shapes_repeat_the_row_of_a_request_of_two
    RAGGED test_a_ragged_batch_runs_flat_and_its_output_is_scattered
    RULES test_each_rule_has_tritons_text
3.6.3 optional inputs: how many there may be, who shares a batch, what flows in an ensemble
    SHAPES test_the_input_count_must_be_between_required_and_total
    SHAPES test_requests_with_other_optional_inputs_are_separated
    RAGGED_SERVED test_requests_with_other_inputs_do_not_share_a_batch
    SERVED test_an_output_that_a_model_left_out
    SERVED test_an_optional_input_of_the_ensemble
3.7.1 a step fires when all it reads is there; each response of a decoupled one for itself
    FLOW test_every_needed_step_runs_once_and_nothing_is_kept
    SERVED test_each_response_of_a_decoupled_step_is_a_response
    GRAPH test_steps_that_do_not_fit_are_refused
    GRAPH test_an_ensemble_is_decoupled_if_a_step_is
3.7.2 steps that no requested output needs do not run
    SERVED test_steps_that_no_requested_output_needs_do_not_run
3.7.3 id, correlation id, flags, priority, timeout and parameters are forwarded to every step
    SERVED test_request_parameters_are_forwarded_to_every_step
    ENSEMBLE test_every_step_has_the_priority_of_the_request
    WHOLE test_sequence_parameters_of_a_step_hold_for_later_steps
3.7.4 steps with and without a batch dimension mix; none allows smaller batches
    SERVED test_batch_dimensions_are_added_and_removed
    GRAPH test_batching_models_and_other_models_may_be_mixed
    GRAPH test_steps_that_do_not_fit_are_refused
3.7.5 errors have the ensemble's prefix once, and wait for steps that run; a deadlock is told
    SERVED test_errors_are_prefixed_by_each_ensemble
    ENSEMBLE test_an_error_waits_for_the_steps_that_run
    OUTPUTS test_no_step_that_waited_begins_after_a_failure
    ENSEMBLE test_a_missing_output_is_a_deadlock
    SERVED test_an_output_that_a_model_left_out
3.7.6 cancellation is checked before each step
    ENSEMBLE test_a_cancelled_request_begins_no_step
    WHOLE test_a_disconnecting_client_cancels_the_running_step
3.7.7 max_inflight_requests: a step has only so many of all requests
    ENSEMBLE test_requests_of_a_step_are_limited
    WHOLE test_the_requests_in_flight_of_a_step_are_limited
3.7.8 what is checked at load
    GRAPH test_steps_that_do_not_fit_are_refused
    CONFIG test_ensembles_are_checked
    CONFIG test_cyclic_and_incomplete_graphs_are_refused
3.7.9 compute times are the steps' sums, one execution a request, never pending
    SERVED test_statistics_are_sums_of_steps
    ENSEMBLE test_compute_times_are_summed_over_steps
"""


@cache
def _find_tests(file: str) -> set[str]:
    text = (TESTS / FILES[file]).read_text()
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))


@pytest.mark.parametrize(
    "bullet", re.split(r"\n(?=\d)", BULLETS.strip()), ids=lambda bullet: bullet.split()[0]
)
def test_a_bullet_has_tests(bullet: str) -> None:
    tests = [line.split() for line in bullet.splitlines()[1:]]
    missing_tests = [f"{file}::{name}" for file, name in tests if name not in _find_tests(file)]
    assert tests and not missing_tests
