"""Responses of the text backend: streams, stop reasons, several samples, successors, errors."""

import itertools
import json
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages import generation as g
from shmserve.ipc.messages.inference import CancelExecution, CreditExecution
from shmserve.workers.backends.llm import texts, worker_engine
from shmserve.workers.backends.llm.message_parsers import MessageFormat
from shmserve.workers.backends.llm.parameters import parse
from shmserve.workers.backends.llm.prompts import PromptReader
from shmserve.workers.backends.llm.texts import SampleText
from shmserve.workers.backends.llm.token_texts import (
    Detokenizer,
    StopStrings,
    TokenTexts,
    with_pauses,
)
from shmserve.workers.backends.llm.tool_formats import FAMILIES
from shmserve.workers.backends.llm.worker_engine import Prompt
from tests.rigs.llm_rig import Scheduler, llm_rig, work
from tests.support.hf_folders import END, tokenizer_text
from tests.support.scripted_llm import CALLED, write_scripted
from tests.support.waiting import until
from tests.unit.workers.backends.llm.conftest import generate, reference

Folder = Callable[..., Path]
PROMPT = [5, 77, 130, 200]
GREEDY: dict[str, Any] = {"input_ids": PROMPT, "temperature": 0, "ignore_eos": True}
TOKENIZER = Tokenizer.from_str(tokenizer_text())
(Q,), END_TOKEN = TOKENIZER.encode("q").ids, TOKENIZER.token_to_id(END)


@pytest.fixture
def scheduler(folder: Folder, tmp_path: Path) -> Iterator[Scheduler]:
    with llm_rig(tmp_path / "rig", folder()) as engine_rig:
        yield engine_rig


def greedy_tokens(folder: Folder, count: int) -> list[int]:
    return generate(folder(), PROMPT, max_new_tokens=count, eos_token_id=-1)


@pytest.mark.parametrize("stop", [[], ["abc"]])
def test_streams_send_each_token(scheduler: Scheduler, folder: Folder, stop: list[str]) -> None:
    scheduler.generate(1, stream=True, max_tokens=24, stop=stop, **GREEDY)
    responses = scheduler.responses[1]
    assert [len(r["token_ids"]) for r in responses] == [1] * 24
    assert [""] in [r["text_output"] for r in responses]
    assert scheduler.tokens(1) == greedy_tokens(folder, 24)
    assert scheduler.text(1) == TOKENIZER.decode(greedy_tokens(folder, 24))
    assert [r["finish_reason"] for r in responses[:-1]] == [[""]] * (len(responses) - 1)
    assert responses[-1]["finish_reason"] == ["length"]
    assert responses[-1]["usage"] == [
        {"prompt_tokens": 4, "completion_tokens": 24, "cached_tokens": 0, "samples": [24]}
    ]
    characters = [r.sent_characters for r in scheduler.responses_sent]
    assert characters == sorted(characters) and characters[0] == len(responses[0]["text_output"][0])


@pytest.mark.parametrize(
    ("options", "has_unsent"),
    [({}, False), ({"logprobs": 0}, True), ({"return_token_ids": True}, True)],
)
def test_a_token_without_a_part_of_the_message_is_sent_if_it_is_shown(
    options: dict[str, Any], has_unsent: bool
) -> None:
    prompt = Prompt(1, PROMPT, parse({"stream": True, **options}, {}, 320), ())
    prompt.message_format = MessageFormat(FAMILIES["hermes"], {"f": {}})
    (token,) = TOKENIZER.encode("<").ids
    sample = SampleText(prompt, TokenTexts(TOKENIZER), 0, "", parses_message=True)
    sample.add([token], "", [])
    assert sample.has_unsent == has_unsent
    sample.take()
    assert not sample.has_unsent


@pytest.mark.parametrize("counts_reasoning", [False, True])
def test_a_message_has_the_number_of_reasoning_tokens(counts_reasoning: bool) -> None:
    prompt = Prompt(1, PROMPT, parse({"stream": True}, {}, 320), ())
    prompt.message_format = MessageFormat(FAMILIES["hermes"], {}, ("<", ">"))
    sample = SampleText(prompt, TokenTexts(TOKENIZER), 0, "", parses_message=True)
    counts = []
    for token in TOKENIZER.encode("<ab>c").ids:
        sample.add([token], "", [])
        message = json.loads(sample.take_message("", counts_reasoning))
        counts.append(message.get("reasoning_tokens"))
    assert counts[-1] == (sample.reasoning_tokens if counts_reasoning else None)
    assert (counts == sorted(counts) and counts[-1] >= 2) if counts_reasoning else not any(counts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_call", [False, True])
def test_the_tokens_of_a_call_that_ends_the_reasoning_are_not_reasoning(
    stream: bool, is_call: bool
) -> None:
    prompt = Prompt(1, PROMPT, parse({"stream": stream}, {}, 320), ())
    prompt.message_format = MessageFormat(FAMILIES["mistral"], {"f": {}}, ("<", ">"), True)
    sample = SampleText(prompt, TokenTexts(TOKENIZER), 0, "", parses_message=True)
    reasoning, call = "ab[TOOL_CALLS]", "f{}" if is_call else "f?{}"
    tokens = [TOKENIZER.encode(text).ids for text in (reasoning, call, "c")]
    for token in itertools.chain(*tokens):
        sample.add([token], "", [])
    assert sample.reasoning_tokens == len(tokens[0]) + (0 if is_call else len(tokens[1]) + 1)


@pytest.mark.parametrize(
    ("fields", "is_echoed"),
    [
        ({}, True),
        ({"stream": "false"}, True),
        ({"stream": True}, False),
        ({"exclude_input_in_output": True}, False),
        ({"exclude_input_in_output": "False"}, True),
    ],
)
def test_a_text_begins_with_its_prompt_as_in_triton(
    scheduler: Scheduler, fields: dict[str, Any], is_echoed: bool
) -> None:
    settings = {"exclude_input_in_output": None, "temperature": 0, "max_tokens": 3, **fields}
    scheduler.generate(1, text_input="the quick", outputs=["text_output"], **settings)
    assert scheduler.responses[1][0].keys() == {"text_output"}
    (text,) = scheduler.responses[1][0]["text_output"]
    assert text.startswith("the quick") == is_echoed


def test_outputs_of_a_request_that_names_none(scheduler: Scheduler) -> None:
    expected: Any = ({}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"return_token_ids": True})
    for key, options in enumerate(expected):
        scheduler.add(key, input_ids=PROMPT, outputs=[], max_tokens=2, **options)
    scheduler.run()
    found = [scheduler.responses[key][0].keys() for key in range(len(expected))]
    text, scored = {"text_output"}, {"text_output", "logprobs"}
    assert found == [text, scored, scored, text | {"token_ids", "prompt_token_ids"}]


def test_samples_depend_on_their_seed(scheduler: Scheduler) -> None:
    settings: dict[str, Any] = {
        "input_ids": PROMPT, "max_tokens": 10, "n": 3, "seed": 7, "ignore_eos": True,
    }  # fmt: skip
    scheduler.add(1, stream=True, **settings)
    scheduler.step()
    scheduler.generate(2, **settings)
    (joint_response,) = scheduler.responses[2]
    assert joint_response["index"] == [0, 1, 2]
    assert [scheduler.text(1, index) for index in range(3)] == joint_response["text_output"]
    assert len(set(joint_response["text_output"])) == 3
    assert joint_response["usage"][0]["samples"] == [10, 10, 10]


def test_a_text_ends_before_its_stop_string(scheduler: Scheduler, folder: Folder) -> None:
    full_text = TOKENIZER.decode(greedy_tokens(folder, 30))
    pairs = [full_text[index : index + 2] for index in range(2, len(full_text) - 2)]
    stop_string = next(pair for pair in pairs if "\ufffd" not in pair)
    option_sets: list[dict[str, Any]] = [{}, {"stream": True}, {"include_stop_str_in_output": True}]
    for key, options in enumerate(option_sets, 1):
        scheduler.add(key, max_tokens=30, stop=[stop_string, "never"], **GREEDY, **options)
    scheduler.run()
    stop_index = full_text.index(stop_string)
    assert [scheduler.text(1), scheduler.text(2)] == [full_text[:stop_index]] * 2
    assert scheduler.text(3) == full_text[: stop_index + len(stop_string)]
    for key in (1, 2, 3):
        last_response = scheduler.responses[key][-1]
        assert last_response["finish_reason"] == ["stop"]
        assert last_response["stop_reason"] == [stop_string]
        assert last_response["usage"][0]["completion_tokens"] < 30


def test_stop_reasons_are_the_tokens_that_end_a_text(tmp_path: Path, folder: Folder) -> None:
    """As in vLLM, the tokenizer's end token is not reported; other end tokens are."""
    token = greedy_tokens(folder, 2)[1]
    text = TOKENIZER.decode(greedy_tokens(folder, 1))
    path = shutil.copytree(folder(), tmp_path / "ends")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, token]}))
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"ignore_eos": False}, token),
        ({"stop_token_ids": [token]}, token),
        ({"ignore_eos": False, "stop_token_ids": [0], "logit_bias": {"0": 100}}, None),
        ({"stop_token_ids": [0], "logit_bias": {"0": 100}}, 0),
        ({"ignore_eos": False, "stop": [END], "logit_bias": {"0": 100}}, None),
        ({"stop": [END], "logit_bias": {"0": 100}}, END),
        ({"max_tokens": 1}, None),
        ({"max_tokens": 1, "stop": [text]}, text),
        ({"max_tokens": 1, "stop": [text], "min_tokens": 1}, None),
    ]
    with llm_rig(tmp_path / "stops", path) as scheduler:
        for key, (options, _) in enumerate(cases):
            scheduler.add(key, **{**GREEDY, "max_tokens": 5, **options})
        scheduler.run()
        reasons = [scheduler.responses[key][-1]["stop_reason"] for key in range(len(cases))]
    assert reasons == [[reason] for _, reason in cases]


def test_a_client_that_reads_nothing_delays_none(scheduler: Scheduler, folder: Folder) -> None:
    scheduler.clients_read = False
    scheduler.add(1, stream=True, max_tokens=120, **GREEDY)
    # This request ends once all texts of the first request are available.
    scheduler.add(2, max_tokens=120, **GREEDY)
    while scheduler.running:
        scheduler.step()
    while 2 not in scheduler.ended:
        scheduler.listen()
    responses = scheduler.responses[1]
    assert len(responses) == 32 and 1 not in scheduler.ended
    scheduler.rig._send(CreditExecution(1, 32))
    scheduler.rig.instance.link.receive()
    scheduler.finish()
    assert len(responses) == 33
    assert scheduler.tokens(1) == greedy_tokens(folder, 120)


def test_a_request_without_a_reader_fails_while_other_requests_generate(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_MAX_WAIT_NS", int(0.3e9))
    scheduler.clients_read = False
    scheduler.add(1, stream=True, max_tokens=120, **GREEDY)
    scheduler.add(2, max_tokens=400, **GREEDY)
    while scheduler.running and 1 not in scheduler.ended:
        scheduler.step()
        time.sleep(0.01)
    assert 2 not in scheduler.ended and scheduler.errors[1][0] == "UNAVAILABLE"
    assert len(scheduler.responses[1]) == 32


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_ends_at_once(scheduler: Scheduler, stream: bool) -> None:
    scheduler.add(1, stream=stream, max_tokens=50, **GREEDY)
    scheduler.add(2, max_tokens=12, **GREEDY)
    for _ in range(4):
        scheduler.step()
    scheduler.rig.instance.link._dispatch(CancelExecution(1))
    while 1 not in scheduler.ended:
        scheduler.listen()
    scheduler.run()
    assert len(scheduler.tokens(2)) == 12 and scheduler.is_idle


def test_a_sequence_of_a_request_that_has_ended_is_lost(scheduler: Scheduler) -> None:
    scheduler.add(1, max_tokens=5, **GREEDY)
    scheduler.rig.instance.link._dispatch(CancelExecution(1))
    running_requests = dict(scheduler.running)
    while 1 not in scheduler.ended:
        scheduler.listen()
    scheduler.running.update(running_requests)  # the scheduler has not been notified of the end yet
    assert not scheduler.step()
    assert scheduler.stepped is not None and scheduler.stepped.skipped == list(running_requests)


@pytest.mark.parametrize("sent_count", [0, 5, 10])
def test_a_successor_continues_a_lost_workers_text(scheduler: Scheduler, sent_count: int) -> None:
    settings: dict[str, Any] = {"input_ids": PROMPT, "seed": 3, "max_tokens": 30, "stream": True}
    settings |= {"n": 2, "ignore_eos": True}
    scheduler.generate(1, **settings)
    texts = [scheduler.text(1, index) for index in range(2)]
    tokens: list[list[int]] = [[], []]
    for response in scheduler.responses[1]:
        tokens[response["index"][0]] += response["token_ids"]
    resumed_samples = [
        g.Resumed(0, np.array(tokens[0][:12], np.int32).tobytes(), sent_count),
        g.Resumed(1, np.array(tokens[1], np.int32).tobytes(), sent_count, "length"),
    ]
    scheduler.add(2, resumed_samples, **settings)
    assert len(scheduler.running) == 1
    scheduler.run()
    assert [scheduler.text(2, index) for index in range(2)] == [text[sent_count:] for text in texts]
    assert scheduler.responses[2][-1]["usage"][0]["samples"] == [30, 30]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 1, 12])
def test_a_successor_reports_all_tokens_and_their_logprobs(
    scheduler: Scheduler, stream: bool, count: int
) -> None:
    settings: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": 20, "stream": stream, "n": 2}
    settings |= {"ignore_eos": True, "logprobs": 1, "echo": True, "exclude_input_in_output": None}
    scheduler.generate(1, **settings, seed=3)
    full = [entries_of(scheduler, 1, index) for index in (0, 1)]
    tokens = [[entry["token_id"] for entry in content] for _, content in full]
    first = [entry for entry in scheduler.responses[1] if entry["index"] == [0]][:count] * stream
    characters = sum(len(entry["text_output"][0]) for entry in first)
    sent_count = sum(len(entry["token_ids"]) for entry in first)
    resumed_samples = [
        g.Resumed(0, np.array(tokens[0][4 : 4 + 12], np.int32).tobytes(), characters, "", False,
                  sent_count),
        g.Resumed(1, np.array(tokens[1][4:], np.int32).tobytes(), 0, "length"),
    ]  # fmt: skip
    scheduler.generate(2, resumed_samples, **settings, seed=5)
    text, content = entries_of(scheduler, 2, 0)
    content_count = sum(len(entry["logprobs"][0]["content"]) for entry in first)
    assert text.startswith(TOKENIZER.decode(tokens[0][:16]).rstrip("\ufffd")[characters:])
    known_entries = [*content[: 16 - content_count]]
    assert [entry["token_id"] for entry in known_entries] == tokens[0][content_count:16]
    expected = [entry["logprob"] for entry in full[0][1][content_count:16]]
    assert [entry["logprob"] for entry in known_entries] == pytest.approx(expected, abs=1e-4)
    assert [entry["text_offset"] for entry in known_entries] == [
        entry["text_offset"] for entry in full[0][1][content_count:16]
    ]
    assert len(content) == 24 - content_count
    ended = entries_of(scheduler, 2, 1)
    assert ended[0] == full[1][0] and [entry["token_id"] for entry in ended[1]] == tokens[1]
    assert scheduler.responses[2][-1]["usage"][0]["samples"] == [20, 20]


def entries_of(scheduler: Scheduler, key: int, row: int) -> tuple[str, list[dict[str, Any]]]:
    content = [
        token
        for response in scheduler.responses[key]
        if row in response["index"]
        for token in response["logprobs"][response["index"].index(row)]["content"]
    ]
    return scheduler.text(key, row), content


def test_logprobs_of_prompt_and_text(scheduler: Scheduler, folder: Folder) -> None:
    prompt = [*PROMPT, 9, 8, 7, 6, 5]
    scheduler.chunk = 4
    settings: dict[str, Any] = {"input_ids": prompt, "temperature": 0, "max_tokens": 4}
    scheduler.add(1, logprobs=2, prompt_logprobs=1, **settings)
    assert scheduler.prepared[1].needs_whole_prompt
    scheduler.run()
    responses = scheduler.responses[1][0]["logprobs"][0]
    tokens = [*prompt, *scheduler.tokens(1)]
    with torch.inference_mode():
        expected = reference(folder())(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert responses["prompt"][0] is None
    for index, token_entry in enumerate([*responses["prompt"][1:], *responses["content"]], 1):
        assert token_entry["token_id"] == tokens[index]
        assert token_entry["logprob"] == pytest.approx(
            expected[index - 1, tokens[index]].item(), abs=1e-3
        )
    assert [len(entry["top_logprobs"]) for entry in responses["content"]] == [2] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_prompt_is_scored_with_its_text(
    scheduler: Scheduler, folder: Folder, stream: bool
) -> None:
    text = "naïve 😀 fox"
    tokens = TOKENIZER.encode(text).ids
    scheduler.chunk = 4
    settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "echo": True, "n": 2}
    settings |= {"exclude_input_in_output": None, "stream": stream, "logprobs": 2}
    scheduler.add(1, max_tokens=5, text_input=text, **settings)
    scheduler.generate(2, max_tokens=5, input_ids=tokens, **settings)
    all_tokens = [*tokens, *generate(folder(), tokens, max_new_tokens=5, eos_token_id=-1)]
    with torch.inference_mode():
        expected = reference(folder())(torch.tensor([all_tokens])).logits[0].log_softmax(-1)
    for key in (1, 2):
        for index in (0, 1):
            assert scheduler.text(key, index) == TOKENIZER.decode(all_tokens)
            _, content = entries_of(scheduler, key, index)
            assert [entry["token_id"] for entry in content] == all_tokens
            assert (content[0]["logprob"], content[0]["top_logprobs"]) == (None, None)
            for position, entry in enumerate(content[1:], 1):
                own_logprob = expected[position - 1, all_tokens[position]]
                assert entry["logprob"] == pytest.approx(own_logprob.item(), abs=1e-3)
                assert entry["rank"] == (expected[position - 1] > own_logprob).sum() + 1
            characters = text.encode()
            for entry in content[: len(tokens)]:
                assert characters.startswith(bytes(entry["bytes"]))
                characters = characters[len(entry["bytes"]) :]
            offsets = [entry["text_offset"] for entry in content]
            assert offsets[: len(tokens)] == [begin for begin, _ in TOKENIZER.encode(text).offsets]
            assert offsets == sorted(offsets) and offsets[len(tokens)] == len(text)


def test_no_token_is_generated_if_only_the_prompt_is_scored(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = Mock(side_effect=with_pauses)
    monkeypatch.setattr(texts, "with_pauses", pausing)
    settings: dict[str, Any] = {"max_tokens": 0, "logprobs": 1, "echo": True}
    settings["exclude_input_in_output"] = None
    scheduler.add(1, input_ids=[5] * 64, **settings)
    scheduler.add(2, input_ids=[5] * 64, **settings, stream=True)
    outputs = ["text_output", "token_ids", "finish_reason", "usage"]
    # The maximum number of tokens.
    scheduler.generate(3, input_ids=[5] * 512, outputs=outputs, **settings)
    for key, count in ((1, 64), (2, 64), (3, 512)):
        (response,) = scheduler.responses[key]
        assert response["text_output"] == [TOKENIZER.decode([5] * count)]
        assert response["token_ids"] == [] and response["finish_reason"] == ["length"]
        assert response["usage"][0]["completion_tokens"] == 0
        assert key == 3 or len(response["logprobs"][0]["content"]) == count
    assert pausing.called  # other threads need the GIL


def test_without_an_option_only_the_generated_text_is_returned(scheduler: Scheduler) -> None:
    settings: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": 2, "logprobs": 0}
    scheduler.add(1, exclude_input_in_output=None, **settings)
    assert not scheduler.prepared[1].needs_whole_prompt
    scheduler.run()
    assert len(scheduler.responses[1][0]["logprobs"][0]["content"]) == 2


def test_beams_have_candidates_and_chosen_texts(scheduler: Scheduler, folder: Folder) -> None:
    scheduler.prepare(2, input_ids=PROMPT, use_beam_search=True, n=2, stop_token_ids=[7])
    assert scheduler.prepared.pop(2).beams[0].end_tokens == [0, 7]
    scheduler.prepare(1, input_ids=PROMPT, use_beam_search=True, n=2, max_tokens=5)
    (beams,) = scheduler.prepared[1].beams
    assert (beams.width, beams.end_tokens, beams.early_stopping) == (2, [0], "false")
    root = scheduler.enter(1, 0, PROMPT)
    (first_result,) = scheduler.step()
    with torch.inference_mode():
        expected = reference(folder())(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).topk(4)
    assert first_result.candidates == expected.indices.tolist()
    assert first_result.scores == pytest.approx(expected.values.tolist(), abs=1e-4)
    children = [scheduler.fork(root, 0, token) for token in first_result.candidates[:2]]
    scheduler.release(root.number)
    for child, result in zip(children, scheduler.step(), strict=True):
        with torch.inference_mode():
            logits = reference(folder())(torch.tensor([child.tokens])).logits[0, -1]
        assert result.candidates == logits.topk(4).indices.tolist()
    hypotheses = [g.Hypothesis(np.array([61, 62, 0], np.int32).tobytes(), "stop", -1.0),
             g.Hypothesis(np.array([63], np.int32).tobytes(), "length", -2.0)]  # fmt: skip
    scheduler.send(g.Choose(1, hypotheses))
    scheduler.finish()
    (response,) = scheduler.responses[1]
    assert response["text_output"] == [TOKENIZER.decode([61, 62]), TOKENIZER.decode([63])]
    assert response["finish_reason"] == ["stop", "length"]
    assert response["stop_reason"] == [0, None]


def test_chats_go_through_the_template(scheduler: Scheduler) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    scheduler.generate(1, messages=json.dumps(messages), temperature=0, max_tokens=2)
    prompt = np.frombuffer(scheduler.prepared[1].prompt, np.int32).tolist()
    rendered = TOKENIZER.decode(prompt, skip_special_tokens=False)
    assert rendered == "<|user|>the fox<|end|><|model|>"
    assert prompt[-1] == TOKENIZER.token_to_id("<|model|>")


@pytest.mark.parametrize(("budget", "text"), [(-1, "sohi"), (1, "sohi"), (0, "hi")])
def test_reasoning_ends_with_its_budget(tmp_path: Path, budget: int, text: str) -> None:
    script, special = ("<think>", "so", "</think>", "hi"), ("<think>", "</think>")
    path = write_scripted(tmp_path / "m", {CALLED: script}, special=special)
    messages = json.dumps([{"role": "user", "content": "a"}])
    with llm_rig(tmp_path / "rig", path, {"reasoning_parser": "qwen3"}) as scheduler:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 9}
        options["thinking_token_budget"] = budget
        scheduler.generate(1, messages=messages, **options)
        assert scheduler.responses[1][-1]["text_output"] == [text]
        if budget >= 0:
            scheduler.add(2, text_input="a", **options)
            assert "thinking_token_budget: only supported by chats" in scheduler.errors[2][1]
            tag = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("</think>")
            scheduler.generate(3, messages=messages, stop_token_ids=[tag], min_tokens=9, **options)
            assert scheduler.errors[3][1].startswith("thinking_token_budget: the other parameters")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": "a", "temperature": -1}, "temperature: -1 is not a number from 0.0"),
        ({}, "exactly one of text_input, input_ids, messages is required, got none"),
        ({"text_input": "a", "input_ids": [1]}, "is required, got text_input and input_ids"),
        ({"text_input": ""}, "text_input: the prompt is empty"),
        ({"input_ids": [1, 320]}, "input_ids: 320 is not a token; allowed are 0 to 319"),
        ({"input_ids": [1] * 512},
         "length is 512 tokens, and the prompt is too long: 512 tokens and one generated"),
        ({"messages": "[1]"}, "messages: [1] is not a JSON list of messages"),
        ({"text_input": "a", "exclude_input_in_output": 1}, "exclude_input_in_output: 1 is not"),
        ({"messages": '[{"role": "u", "content": [{"type": "image"}]}]'}, "'image' is not 'text'"),
        ({"text_input": "a", "regex": "[a"}, "regex: cannot be compiled"),
        ({"text_input": "a", "json_schema": {"type": 3}}, "json_schema: cannot be compiled"),
        ({"text_input": "a", "guided_json": {"type": 3}}, "guided_json: cannot be compiled"),
        ({"text_input": "a", "guided_regex": "("}, "guided_regex: cannot be compiled"),
        ({"text_input": "a", "structured_outputs": {"grammar": "root ::= ("}},
         "structured_outputs: cannot be compiled"),
        ({"text_input": "a", "json_schema": {"$ref": "#"}}, "it matches no text"),
        ({"text_input": "a", "json_schema": {"not": {"type": "null"}}}, 'keys: ["not"]'),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens: 0 generates nothing"),
        ({"text_input": "a" * (2 << 20)}, "the prompt is too long: 2097156 bytes exceed the"),
        ({"text_input": "a " * 20_000}, "tokens and one generated token exceed this limit"),
    ],
)  # fmt: skip
def test_an_error_ends_only_its_own_request(
    scheduler: Scheduler, fields: dict[str, Any], message: str
) -> None:
    scheduler.add(1, **fields)
    code, text = scheduler.errors[1]
    assert code == "INVALID_ARG" and message in text
    scheduler.generate(2, max_tokens=1, **GREEDY)
    assert scheduler.is_idle


def test_a_failing_step_ends_calls(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler.add(1, max_tokens=5, **GREEDY)
    scheduler.step()
    with monkeypatch.context() as patched:
        patched.setattr(worker_engine, "process", lambda *_: 1 / 0)
        assert not scheduler.step()
    assert scheduler.stepped is not None and len(scheduler.stepped.skipped) == 1
    assert scheduler.errors[1][0] == "INTERNAL"
    scheduler.generate(2, max_tokens=5, **GREEDY)
    assert len(scheduler.tokens(2)) == 5


def test_a_sequence_that_cannot_begin_ends_its_request(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.add(1, max_tokens=5, **GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(Prompt, "begin_sequence", lambda *_: 1 / 0)
        assert not scheduler.step()
    assert scheduler.errors[1][0] == "INTERNAL"


class Panic(BaseException):
    """An error that a library in Rust raises."""


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("prompts.PromptReader.read", {}),
        ("prompts.PromptReader.read", {"input_ids": None, "text_input": "a " * 3000}),
        ("prompts.PromptReader.compile", {"regex": "a"}),
        ("prompts.PromptReader.compile", {"bad_words": ["a"]}),
        ("texts.RequestSamples._sample", {}),
        ("texts.RequestSamples.encode_prompt", {"prompt_logprobs": 0}),
        ("texts.SampleText.add", {"stream": True}),
        ("texts.RequestSamples._encode_outputs", {}),
    ],
)
def test_a_panic_ends_only_its_own_request(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, function: str, fields: dict[str, Any]
) -> None:
    path = f"shmserve.workers.backends.llm.{function}"
    calls: list[str] = []

    def fail_once(*arguments: Any) -> Any:
        monkeypatch.undo()
        calls.append(function)
        raise Panic

    settings = {**GREEDY, "max_tokens": 4, **fields}
    settings = {name: value for name, value in settings.items() if value is not None}
    monkeypatch.setattr(path, fail_once)
    scheduler.add(1, **settings)
    scheduler.generate(2, max_tokens=4, **GREEDY)
    assert calls and scheduler.errors[1][0] == "INTERNAL" and 2 in scheduler.responses
    assert scheduler.is_idle
    until("no prompt is kept", lambda: not scheduler.kept_prompts)


def test_a_failed_text_of_a_beam_search_ends_its_request(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.prepare(1, input_ids=PROMPT, use_beam_search=True, n=2, max_tokens=5)
    monkeypatch.setattr(texts.RequestSamples, "add_hypotheses", lambda *_: 1 / 0)
    scheduler.send(g.Choose(1, []))
    scheduler.finish()
    assert scheduler.errors[1][0] == "INTERNAL"
    until("no prompt is kept", lambda: not scheduler.kept_prompts)


def test_a_late_prompt_of_a_lost_scheduler_does_not_replace_its_successors(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_replaced = threading.Event()
    compile_grammar = PromptReader.compile

    def compile_late(reader: PromptReader, prompt: Prompt) -> None:
        assert is_replaced.wait(30)
        compile_grammar(reader, prompt)

    monkeypatch.setattr(PromptReader, "compile", compile_late)
    scheduler.send(g.Prepare([work(1, text_input="the", regex="a")]))
    scheduler.rig.instance.link._disconnect()
    scheduler.add(1, max_tokens=5, **GREEDY)
    is_replaced.set()
    scheduler.generate(2, max_tokens=1, regex="a", **{**GREEDY, "ignore_eos": False})
    assert len(scheduler.tokens(1)) == 5 and not scheduler.errors


@pytest.mark.parametrize(
    ("fields", "method"),
    [({"regex": "b"}, "compile"), ({"text_input": "a " * 3000}, "read")],
    ids=["grammar", "long prompt"],
)
def test_slow_work_of_cancelled_requests_is_skipped(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], method: str
) -> None:
    """Otherwise, requests of a client that has disconnected would delay those of other clients."""
    may_continue = threading.Event()
    calls: list[Any] = []
    original_method = getattr(PromptReader, method)

    def count_calls(reader: PromptReader, *arguments: Any) -> Any:
        if method == "compile" or threading.current_thread().name.startswith("long"):
            calls.append(arguments)
            assert may_continue.wait(30)
        return original_method(reader, *arguments)

    monkeypatch.setattr(PromptReader, method, count_calls)
    for key in range(1, 6):
        scheduler.send(g.Prepare([work(key, **{"text_input": "the", **fields})]))
    for key in range(2, 6):
        scheduler.rig.instance.link._dispatch(CancelExecution(key))
    may_continue.set()
    while not {2, 3, 4, 5} <= scheduler.ended:
        scheduler.listen()
    assert len(calls) == 1


def property_schema(schema: Any) -> dict[str, Any]:
    """Return the format of an object whose only property has this schema."""
    whole: dict[str, Any] = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    whole["additionalProperties"] = False
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": whole}}}


@pytest.mark.parametrize(
    ("grammar", "check"),
    [
        ({"regex": "[ab]{3}(c|d)"}, lambda text: len(text) == 4),
        (property_schema({"type": "integer", "maximum": 99}),
         lambda text: isinstance(json.loads(text)["v"], int)),
    ],
)  # fmt: skip
def test_generated_text_matches_its_grammar(
    scheduler: Scheduler, grammar: dict[str, Any], check: Callable[[str], bool]
) -> None:
    for key in range(1, 7):
        scheduler.add(key, input_ids=PROMPT, max_tokens=60, seed=key, temperature=0.8, **grammar)
    scheduler.run()
    for key in range(1, 7):
        assert scheduler.responses[key][0]["finish_reason"] == ["stop"]
        assert check(scheduler.text(key)), scheduler.text(key)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True,
         "maxItems": 2},
        {"type": "string", "format": "path", "maxLength": 5},
        {"type": "string", "format": "password", "writeOnly": True, "maxLength": 5},
        {"type": "string", "format": "binary", "contentEncoding": "base64", "maxLength": 5},
    ],
)  # fmt: skip
def test_annotations_of_a_schema_restrict_nothing(scheduler: Scheduler, schema: Any) -> None:
    scheduler.generate(1, input_ids=PROMPT, max_tokens=90, seed=1, **property_schema(schema))
    assert list(json.loads(scheduler.text(1))) == ["v"]


def test_white_space_between_parts_is_bounded(scheduler: Scheduler) -> None:
    bias = {str(token): 100 for token in range(320) if TOKENIZER.decode([token]) in (" ", "\n")}
    schema = {"type": "integer", "minimum": 0, "maximum": 9}
    settings: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": 200, "logit_bias": bias}
    scheduler.generate(1, temperature=0, **settings, **property_schema(schema))
    assert scheduler.responses[1][0]["finish_reason"] == ["stop"]
    assert list(json.loads(scheduler.text(1))) == ["v"]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"min_tokens": 10, "regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"ignore_eos": True, "regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_regex": ""}, ""),
        ({"guided_choice": [""]}, ""),
        ({"guided_choice": ["fox", ""]}, "(fox)?"),
        ({"guided_grammar": 'root ::= "a" b\nb ::= "b"'}, "ab"),
        ({"guided_grammar": '?start: "a" b\n!b: "::="'}, "a::="),
        ({"guided_grammar": 'start: "a" b\n?b: "b"'}, "ab"),
    ],
)
def test_a_text_ends_with_its_grammar(
    scheduler: Scheduler, options: dict[str, Any], pattern: str
) -> None:
    scheduler.generate(1, input_ids=PROMPT, max_tokens=20, temperature=0, **options)
    assert scheduler.responses[1][0]["finish_reason"] == ["stop"]
    assert re.fullmatch(pattern, scheduler.text(1))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("settings", [{"guided_regex": "[0-9]{3}"}, {"bad_words": ["q"]}])
def test_parameters_that_allow_no_token_are_an_error(
    scheduler: Scheduler, settings: dict[str, Any], temperature: float
) -> None:
    options: dict[str, Any] = {"allowed_token_ids": [Q], "temperature": temperature, "n": 2}
    scheduler.generate(1, input_ids=PROMPT, **options, **settings)
    code, message = scheduler.errors[1]
    assert code == "INVALID_ARG"
    name = "guided_regex" if "guided_regex" in settings else "allowed_token_ids"
    assert message.startswith(f"{name}: the other parameters forbid all tokens")


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_token_ids": [END_TOKEN]},
        {"allowed_token_ids": [Q, END_TOKEN], "stop_token_ids": [Q]},
        {"allowed_token_ids": [END_TOKEN], "stop": [END], "ignore_eos": True},
        {"stop_token_ids": [*range(320)]},
    ],
)
def test_min_tokens_requires_tokens_that_do_not_end_the_text(
    scheduler: Scheduler, settings: dict[str, Any]
) -> None:
    scheduler.generate(1, input_ids=PROMPT, min_tokens=2, **settings)
    name = "allowed_token_ids" if "allowed_token_ids" in settings else "stop_token_ids"
    text = f"requires tokens that do not end the text, but {name} leaves only end tokens"
    assert scheduler.errors[1] == ("INVALID_ARG", f"min_tokens: 2 {text}")
    scheduler.add(2, input_ids=PROMPT, min_tokens=2, regex="", **settings)
    scheduler.generate(3, input_ids=PROMPT, min_tokens=0, max_tokens=4, **settings)
    assert not scheduler.text(2) and scheduler.responses[3][0]["finish_reason"] == ["stop"]


def test_a_grammar_that_fails_ends_its_request_with_an_error(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.add(1, input_ids=PROMPT, max_tokens=20, temperature=0, regex="[0-9]{9}", n=2)
    scheduler.add(2, max_tokens=8, **GREEDY)
    scheduler.step()
    scheduler.step()
    with monkeypatch.context() as patched:
        error = InvalidArgument("response_format: the grammar has failed")
        patched.setattr(worker_engine, "matcher_error", lambda *_: error)
        scheduler.step()
    assert scheduler.errors[1] == ("INVALID_ARG", error.message)
    scheduler.run()
    assert len(scheduler.tokens(2)) == 8 and scheduler.is_idle


TEXTS = ["naïve café — 東京 und Köln 😀👩‍👩‍👧", "the quick brown fox", "🏳️‍🌈" * 3, " a  b\n\tc "]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_text())


def detokenize(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenTexts(tokenizer), True)
    return [*[detokenizer.add(token) for token in tokens], detokenizer.flush()]


def test_texts_are_complete_for_any_split(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        tokens = tokenizer.encode(text).ids
        for end in range(len(tokens) + 1):
            pieces = detokenize(tokenizer, tokens[:end])
            assert "".join(pieces) == tokenizer.decode(tokens[:end])
            assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_any_tokens_are_streamed_as_they_are_decoded(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    different_count = 0
    for _ in range(300):
        tokens = [rng.randrange(320) for _ in range(rng.randrange(1, 40))]
        different_count += "".join(detokenize(tokenizer, tokens)) != tokenizer.decode(tokens)
    assert different_count == 0


def test_bytes_without_a_character_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    broken_tokens = tokenizer.encode("é").ids[:1] * 40
    assert sum(map(bool, detokenize(tokenizer, broken_tokens)[:-1])) >= 2


def test_no_part_of_a_stop_string_is_sent() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 30)))
        stop_strings = [
            "".join(rng.choice("abc") for _ in range(rng.randrange(1, 5)))
            for _ in range(rng.randrange(1, 4))
        ]
        whole = rng.random() < 0.5
        filtered = StopStrings(stop_strings, whole)
        minimum = rng.choice([0, 0, rng.randrange(30)])  # stop strings are completed after it
        given, emitted, position = "", "", 0
        while position < len(text) and not emitted:
            can_stop = position >= minimum
            size = rng.randrange(1, 4 if can_stop else min(4, minimum - position + 1))
            piece, emitted = filtered.add(text[position : position + size], can_stop)
            given += piece
            position += size
        given += filtered.flush()
        expected = expected_text(text, stop_strings, whole, minimum)
        assert (given, emitted) == expected, (text, stop_strings, minimum)


def expected_text(
    text: str, stop_strings: list[str], includes_stop: bool, minimum: int
) -> tuple[str, str]:
    """Return the text up to the stop string that is completed first, and that stop string.

    Stop strings that end within the first `minimum` characters are ignored.
    """
    for end in range(minimum + 1, len(text) + 1):
        for stop_string in stop_strings:
            if text[:end].endswith(stop_string):
                return text[: end if includes_stop else end - len(stop_string)], stop_string
    return text, ""


def test_a_resumed_sample_whose_text_has_ended_stops(scheduler: Scheduler) -> None:
    settings: dict[str, Any] = {"n": 2, "max_tokens": 30, **GREEDY, "temperature": 1, "seed": 1}
    scheduler.generate(1, **settings)
    texts = scheduler.responses[1][0]["text_output"]
    tokens = np.array(scheduler.tokens(1), np.int32).reshape(2, 30)
    stop = next(c for c in texts[0] if c.isascii() and c not in texts[1])
    resumed_samples = [g.Resumed(index, tokens[index, :29].tobytes(), 0) for index in range(2)]
    scheduler.add(2, resumed_samples, **settings | {"max_tokens": 200, "stop": [stop]})
    first, _ = scheduler.running
    for _ in range(4):
        scheduler.step()
        time.sleep(0.05)
    scheduler.listen(0.1)
    assert first not in scheduler.running


def test_a_bad_word_may_have_tokens_that_the_model_lacks(tmp_path: Path, folder: Folder) -> None:
    assert TOKENIZER.encode("the").ids[0] >= 300
    with llm_rig(tmp_path / "rig", folder(vocab_size=300)) as scheduler:
        scheduler.generate(1, max_tokens=4, bad_words=["the"], **GREEDY)
        assert len(scheduler.tokens(1)) == 4
