"""Views or copies of inputs, depending on a model's failures and on whether copies cure them."""

from shmserve.ipc.messages.inference import Work
from shmserve.ipc.tensors.schemas import Inference, RequestSchema, pack_inference
from shmserve.workers.batch.backend_request import Input, Request
from shmserve.workers.batch.execute import InputPolicy


def request(is_shared: bool) -> Request:
    item = Input("X", "UINT8", (4,), memoryview(bytearray(4)))
    item.is_shared = is_shared
    return Request(
        Work(1, 1, b"", []), RequestSchema(pack_inference(Inference(()))[0]), 0, {"X": item}, {}
    )


def test_only_views_can_be_at_fault() -> None:
    policy = InputPolicy()
    assert policy.should_retry(request(True)) and not policy.should_retry(request(False))


def test_a_copy_that_fixed_an_error_is_remembered() -> None:
    policy = InputPolicy()
    policy.record_retry(has_succeeded=False)
    assert not policy.copies_inputs
    policy.record_retry(has_succeeded=True)
    assert policy.copies_inputs


def test_a_model_with_frequent_errors_is_not_retried_for_a_while() -> None:
    policy = InputPolicy()
    retry_decisions = []
    for _ in range(200):
        retry_decisions.append(policy.should_retry(request(True)))
        if retry_decisions[-1]:
            policy.record_retry(has_succeeded=False)
    assert all(retry_decisions[:16]) and sum(retry_decisions) < 16 + 200 / 16
    assert any(retry_decisions[100:]), "it is never believed for good"
