"""Requests and their texts: streams, ends, several samples, successors, errors."""

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from shmserve.ipc.messages import generation as g
from shmserve.ipc.messages.inference import CancelExecution, CreditExecution
from shmserve.workers.backends.llm import texts
from shmserve.workers.backends.llm.token_texts import Detokenizer, StopStrings, TokenTexts
from tests.rigs.llm_rig import Scheduler, llm_rig
from tests.support.hf_folders import tokenizer_text
from tests.unit.workers.backends.llm.conftest import generated, reference

Folder = Callable[..., Path]
PROMPT = [5, 77, 130, 200]
GREEDY: dict[str, Any] = {"input_ids": PROMPT, "temperature": 0, "ignore_eos": True}
TOKENIZER = Tokenizer.from_str(tokenizer_text())


@pytest.fixture
def scheduler(folder: Folder, tmp_path: Path) -> Iterator[Scheduler]:
    """A worker with a Llama, and its scheduler."""
    with llm_rig(tmp_path / "rig", folder()) as made:
        yield made


def greedy(folder: Folder, count: int) -> list[int]:
    """What follows the prompt."""
    return generated(folder(), PROMPT, max_new_tokens=count, eos_token_id=-1)


def test_a_stream_tells_each_text_as_it_comes(scheduler: Scheduler, folder: Folder) -> None:
    scheduler.add(1, stream=True, max_tokens=24, **GREEDY)
    scheduler.run()
    told = scheduler.responses[1]
    assert len(told) > 8
    assert scheduler.tokens(1) == greedy(folder, 24)
    assert scheduler.text(1) == TOKENIZER.decode(greedy(folder, 24))
    assert [each["finish_reason"] for each in told[:-1]] == [[""]] * (len(told) - 1)
    assert told[-1]["finish_reason"] == ["length"]
    assert told[-1]["usage"] == [
        {"prompt_tokens": 4, "completion_tokens": 24, "cached_tokens": 0, "samples": [24]}
    ]
    characters = [each.characters for each in scheduler.told]
    assert characters == sorted(characters) and characters[0] == len(told[0]["text_output"][0])


@pytest.mark.parametrize(
    ("given", "echoed"),
    [({}, True), ({"stream": True}, False), ({"exclude_input_in_output": True}, False)],
)
def test_a_text_begins_with_its_prompt_as_triton_has_it(
    scheduler: Scheduler, given: dict[str, Any], echoed: bool
) -> None:
    settings = {"exclude_input_in_output": None, "temperature": 0, "max_tokens": 3, **given}
    scheduler.add(1, text_input="the quick", outputs=["text_output"], **settings)
    scheduler.run()
    assert scheduler.responses[1][0].keys() == {"text_output"}
    (text,) = scheduler.responses[1][0]["text_output"]
    assert text.startswith("the quick") == echoed


def test_samples_are_those_of_their_seed(scheduler: Scheduler) -> None:
    settings: dict[str, Any] = {
        "input_ids": PROMPT,
        "max_tokens": 10,
        "n": 3,
        "seed": 7,
        "ignore_eos": True,
    }
    scheduler.add(1, stream=True, **settings)
    scheduler.step()
    scheduler.add(2, **settings)
    scheduler.run()
    (together,) = scheduler.responses[2]
    assert together["index"] == [0, 1, 2]
    assert [scheduler.text(1, index) for index in range(3)] == together["text_output"]
    assert len(set(together["text_output"])) == 3
    assert together["usage"][0]["samples"] == [10, 10, 10]


def test_stop_strings_end_a_text_before_them(scheduler: Scheduler, folder: Folder) -> None:
    whole = TOKENIZER.decode(greedy(folder, 30))
    pairs = [whole[place : place + 2] for place in range(2, len(whole) - 2)]
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    ways: list[dict[str, Any]] = [{}, {"stream": True}, {"include_stop_str_in_output": True}]
    for key, more in enumerate(ways, 1):
        scheduler.add(key, max_tokens=30, stop=[stop, "never"], **GREEDY, **more)
    scheduler.run()
    end = whole.index(stop)
    assert [scheduler.text(1), scheduler.text(2)] == [whole[:end]] * 2
    assert scheduler.text(3) == whole[: end + len(stop)]
    for key in (1, 2, 3):
        last = scheduler.responses[key][-1]
        assert last["finish_reason"] == ["stop"]
        assert last["usage"][0]["completion_tokens"] < 30


def test_who_takes_nothing_is_told_later_and_stops_nobody(
    scheduler: Scheduler, folder: Folder
) -> None:
    scheduler.reads = False
    scheduler.add(1, stream=True, max_tokens=120, **GREEDY)
    scheduler.add(2, max_tokens=120, **GREEDY)  # it ends when all texts of the other are there
    while scheduler.running:
        scheduler.step()
    while 2 not in scheduler.ended:
        scheduler.listen()
    told = scheduler.responses[1]
    assert len(told) == 32 and 1 not in scheduler.ended
    scheduler.made._tell(CreditExecution(1, 32))
    scheduler.made.instance.link.receive()
    scheduler.finish()
    assert len(told) == 33
    assert scheduler.tokens(1) == greedy(folder, 120)


def test_a_client_that_reads_nothing_is_ended_while_others_generate(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_MOST_WAIT_NS", int(0.3e9))
    scheduler.reads = False
    scheduler.add(1, stream=True, max_tokens=120, **GREEDY)
    scheduler.add(2, max_tokens=400, **GREEDY)
    while scheduler.running and 1 not in scheduler.ended:
        scheduler.step()
        time.sleep(0.01)
    assert 2 not in scheduler.ended
    assert scheduler.errors[1][0] == "UNAVAILABLE"
    assert len(scheduler.responses[1]) == 32


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_ends_at_once(scheduler: Scheduler, stream: bool) -> None:
    scheduler.add(1, stream=stream, max_tokens=50, **GREEDY)
    scheduler.add(2, max_tokens=12, **GREEDY)
    for _ in range(4):
        scheduler.step()
    scheduler.made.instance.link._take(CancelExecution(1))
    while 1 not in scheduler.ended:
        scheduler.listen()
    scheduler.run()
    assert len(scheduler.tokens(2)) == 12
    assert scheduler.is_idle


def test_a_sequence_of_a_request_that_has_ended_is_lost(scheduler: Scheduler) -> None:
    scheduler.add(1, max_tokens=5, **GREEDY)
    scheduler.made.instance.link._take(CancelExecution(1))
    running = dict(scheduler.running)
    while 1 not in scheduler.ended:
        scheduler.listen()
    scheduler.running.update(running)  # its scheduler has not heard yet
    assert not scheduler.step()
    assert scheduler.stepped is not None and scheduler.stepped.lost == list(running)


@pytest.mark.parametrize("told", [0, 5, 10])
def test_a_successor_goes_on_where_another_worker_was_lost(scheduler: Scheduler, told: int) -> None:
    settings: dict[str, Any] = {"input_ids": PROMPT, "seed": 3, "max_tokens": 30, "stream": True}
    settings |= {"n": 2, "ignore_eos": True}
    scheduler.add(1, **settings)
    scheduler.run()
    whole = [scheduler.text(1, index) for index in range(2)]
    tokens = [
        [t for each in scheduler.responses[1] if each["index"] == [n] for t in each["token_ids"]]
        for n in range(2)
    ]
    resumed = [
        g.Resumed(0, np.array(tokens[0][:12], np.int32).tobytes(), told),
        g.Resumed(1, np.array(tokens[1], np.int32).tobytes(), told, "length"),
    ]
    scheduler.add(2, resumed, **settings)
    assert len(scheduler.running) == 1
    scheduler.run()
    assert [scheduler.text(2, index) for index in range(2)] == [text[told:] for text in whole]
    assert scheduler.responses[2][-1]["usage"][0]["samples"] == [30, 30]


def test_logprobs_of_prompt_and_text(scheduler: Scheduler, folder: Folder) -> None:
    prompt = [*PROMPT, 9, 8, 7, 6, 5]
    scheduler.chunk = 4
    settings: dict[str, Any] = {"input_ids": prompt, "temperature": 0, "max_tokens": 4}
    scheduler.add(1, logprobs=2, prompt_logprobs=1, **settings)
    assert scheduler.prepared[1].whole
    scheduler.run()
    told = scheduler.responses[1][0]["logprobs"][0]
    tokens = [*prompt, *scheduler.tokens(1)]
    with torch.inference_mode():
        wanted = reference(folder())(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert told["prompt"][0] is None
    for place, found in enumerate([*told["prompt"][1:], *told["content"]], 1):
        assert found["token_id"] == tokens[place]
        assert found["logprob"] == pytest.approx(wanted[place - 1, tokens[place]].item(), abs=1e-3)
    assert [len(each["top_logprobs"]) for each in told["content"]] == [2] * 4


def test_beams_have_candidates_and_their_texts_are_chosen(
    scheduler: Scheduler, folder: Folder
) -> None:
    scheduler.prepare(1, input_ids=PROMPT, use_beam_search=True, n=2, max_tokens=5)
    (beams,) = scheduler.prepared[1].beams
    assert (beams.width, beams.ends, beams.early_stopping) == (2, [0], "false")
    root = scheduler.enter(1, 0, PROMPT)
    (first,) = scheduler.step()
    with torch.inference_mode():
        wanted = reference(folder())(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).topk(4)
    assert first.candidates == wanted.indices.tolist()
    assert first.scores == pytest.approx(wanted.values.tolist(), abs=1e-4)
    children = [scheduler.fork(root, 0, token) for token in first.candidates[:2]]
    scheduler.drop(root.number)
    for child, result in zip(children, scheduler.step(), strict=True):
        with torch.inference_mode():
            logits = reference(folder())(torch.tensor([child.tokens])).logits[0, -1]
        assert result.candidates == logits.topk(4).indices.tolist()
    found = [g.Hypothesis(np.array([61, 62, 0], np.int32).tobytes(), "stop", -1.0),
             g.Hypothesis(np.array([63], np.int32).tobytes(), "length", -2.0)]  # fmt: skip
    scheduler.send(g.Choose(1, found))
    scheduler.finish()
    (response,) = scheduler.responses[1]
    assert response["text_output"] == [TOKENIZER.decode([61, 62]), TOKENIZER.decode([63])]
    assert response["finish_reason"] == ["stop", "length"]


def test_chats_go_through_the_template(scheduler: Scheduler) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    scheduler.add(1, messages=json.dumps(messages), temperature=0, max_tokens=2)
    scheduler.run()
    prompt = np.frombuffer(scheduler.prepared[1].prompt, np.int32).tolist()
    assert TOKENIZER.decode(prompt, skip_special_tokens=False) == (
        "<|user|>the fox<|end|><|model|>"
    )
    assert prompt[-1] == TOKENIZER.token_to_id("<|model|>")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text_input": "a", "temperature": -1}, "temperature: -1 is not a number from 0.0"),
        ({}, "the prompt is one of text_input, input_ids, messages: none is given"),
        ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids is given"),
        ({"text_input": ""}, "text_input: the prompt is empty"),
        ({"input_ids": [1, 320]}, "input_ids: 320 is not a token, these are 0 to 319"),
        ({"input_ids": [1] * 512}, "the prompt has 512 tokens, and with one more the model takes"),
        ({"messages": "[1]"}, "messages: [1] is not a JSON list of messages"),
        ({"messages": '[{"role": "u", "content": [{"type": "image"}]}]'}, "'image' is not 'text'"),
        ({"text_input": "a", "regex": "[a"}, "regex: cannot be compiled"),
        ({"text_input": "a", "json_schema": {"type": 3}}, "response_format: cannot be compiled"),
    ],
)
def test_what_is_wrong_ends_the_request_and_nothing_else(
    scheduler: Scheduler, given: dict[str, Any], message: str
) -> None:
    scheduler.add(1, **given)
    code, text = scheduler.errors[1]
    assert code == "INVALID_ARG" and message in text
    scheduler.add(2, max_tokens=1, **GREEDY)
    scheduler.run()
    assert scheduler.is_idle


def test_a_step_that_fails_ends_its_requests(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.add(1, max_tokens=5, **GREEDY)
    scheduler.step()
    with monkeypatch.context() as patched:
        patched.setattr("shmserve.workers.backends.llm.engine.process", lambda *_: 1 / 0)
        assert not scheduler.step()
    assert scheduler.stepped is not None and len(scheduler.stepped.lost) == 1
    assert scheduler.errors[1][0] == "INTERNAL"
    scheduler.add(2, max_tokens=5, **GREEDY)
    scheduler.run()
    assert len(scheduler.tokens(2)) == 5


@pytest.mark.parametrize(
    ("grammar", "check"),
    [
        ({"regex": "[ab]{3}(c|d)"}, lambda text: len(text) == 4),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {
                "type": "object", "properties": {"a": {"type": "integer", "maximum": 99}},
                "required": ["a"], "additionalProperties": False}}}},
            lambda text: isinstance(json.loads(text)["a"], int),
        ),
    ],
)  # fmt: skip
def test_a_grammar_holds(
    scheduler: Scheduler, grammar: dict[str, Any], check: Callable[[str], bool]
) -> None:
    for key in range(1, 7):
        scheduler.add(key, input_ids=PROMPT, max_tokens=60, seed=key, temperature=0.8, **grammar)
    scheduler.run()
    for key in range(1, 7):
        assert scheduler.responses[key][0]["finish_reason"] == ["stop"]
        assert check(scheduler.text(key)), scheduler.text(key)


TEXTS = ["naïve café — 東京 und Köln 😀👩‍👩‍👧", "the quick brown fox", "🏳️‍🌈" * 3, " a  b\n\tc "]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tests' tokenizer of bytes and pairs."""
    return Tokenizer.from_str(tokenizer_text())


def told(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The pieces in which tokens are told."""
    detokenizer = Detokenizer(TokenTexts(tokenizer), True)
    return [*[detokenizer.add(token) for token in tokens], detokenizer.flush()]


def test_texts_are_whole_wherever_they_are_cut(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        tokens = tokenizer.encode(text).ids
        for end in range(len(tokens) + 1):
            pieces = told(tokenizer, tokens[:end])
            assert "".join(pieces) == tokenizer.decode(tokens[:end])
            assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_any_tokens_are_told_as_they_are_decoded(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)
    differ = 0
    for _ in range(300):
        tokens = [chance.randrange(320) for _ in range(chance.randrange(1, 40))]
        differ += "".join(told(tokenizer, tokens)) != tokenizer.decode(tokens)
    assert differ == 0


def test_bytes_without_a_character_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("é").ids[:1] * 40
    assert sum(map(bool, told(tokenizer, broken)[:-1])) >= 2


def test_nothing_of_a_stop_string_is_told() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choice("abc") for _ in range(chance.randrange(1, 30)))
        count = chance.randrange(1, 4)
        stops = ["".join(chance.choice("abc") for _ in range(chance.randrange(1, 5)))
                 for _ in range(count)]  # fmt: skip
        included = chance.random() < 0.5
        filtered, given, found, place = StopStrings(stops, included), "", False, 0
        while place < len(text) and not found:
            size = chance.randrange(1, 4)
            piece, found = filtered.add(text[place : place + size])
            given += piece
            place += size
        given += filtered.flush()
        assert given == expected(text, stops, included), (text, stops)


def expected(text: str, stops: list[str], included: bool) -> str:
    """A text up to the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if included else end - len(stop)]
    return text
