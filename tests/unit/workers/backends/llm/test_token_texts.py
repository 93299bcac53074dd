"""The texts and bytes of tokens, byte-level and with byte fallback."""

import json
import random
import time
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from shmserve.workers.backends.llm.token_texts import (
    BadWords,
    Detokenizer,
    TokenTexts,
    encode_logprobs,
    parse_json,
)
from tests.support.hf_folders import tokenizer_text


def fallback_vocabulary() -> Tokenizer:
    """Return a vocabulary like that of Llama 2: pieces with U+2581, and bytes."""
    pieces = ["▁", "▁the", "▁of", "sea", "▁a", ",", "é"]
    names = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces]
    vocabulary = {name: token for token, name in enumerate(names)}
    test_tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    test_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    test_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    test_tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return test_tokenizer


VOCABULARIES = {"bytes": Tokenizer.from_str(tokenizer_text()), "fallback": fallback_vocabulary()}


@pytest.fixture(params=VOCABULARIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return VOCABULARIES[request.param]


def token(tokenizer: Tokenizer, piece: str) -> int:
    """Return the token of a piece, or -1 if the vocabulary lacks it."""
    token_id = tokenizer.token_to_id(piece)
    return -1 if token_id is None else token_id


def tokenize(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, tokenized piece by piece so that characters are split."""
    byte_tokens = [token(tokenizer, f"<0x{byte:02X}>") for byte in text.encode()]
    return tokenizer.encode(text).ids if -1 in byte_tokens else byte_tokens


@pytest.mark.parametrize("skips_special", [True, False])
def test_prompt_and_answer_decode_to_all_text(tokenizer: Tokenizer, skips_special: bool) -> None:
    texts, rng = TokenTexts(tokenizer), random.Random(0)
    full_tokens = tokenize(tokenizer, "the 😀 of é 東京, a")
    plain = [token(tokenizer, piece) for piece in ("▁the", "▁", "▁of", "sea", "</s>", "▁a")]
    plain = [piece for piece in plain if piece >= 0] or tokenizer.encode(" a  b\tthe ").ids
    drawn_prompts = [rng.choices(plain, k=9) for _ in range(100)]
    for tokens in [full_tokens, *drawn_prompts]:
        for cut in range(len(tokens) + 1):
            prompt, answer = tokens[:cut], tokens[cut:]
            echoed = texts.decode(prompt[: texts.count_complete(prompt)], skips_special)
            detokenizer = Detokenizer(texts, skips_special, prompt)
            pieces = [*map(detokenizer.add, answer), detokenizer.flush()]
            assert echoed + "".join(pieces) == texts.decode(tokens, skips_special)


def test_the_bytes_of_tokens_join_to_their_text(tokenizer: Tokenizer) -> None:
    texts, text = TokenTexts(tokenizer), "sea 😀é, 東"
    tokens = tokenize(tokenizer, text)
    assert b"".join(map(texts.bytes_of, tokens)) == text.encode()
    assert texts.bytes_of(1 << 20) == b""


def test_a_decoded_token_keeps_its_space() -> None:
    tokenizer = VOCABULARIES["fallback"]
    texts = TokenTexts(tokenizer)
    pieces = [texts.bytes_of(token(tokenizer, piece)) for piece in ("▁the", "▁", "</s>", "é")]
    assert pieces == [b" the", b" ", b"</s>", "é".encode()]


def test_a_token_begins_at_its_character(tokenizer: Tokenizer) -> None:
    texts, text = TokenTexts(tokenizer), "a😀é東,"
    tokens = tokenize(tokenizer, text)
    starts = [text.encode()[: sum(len(texts.bytes_of(token_id)) for token_id in tokens[:index])]
              for index in range(len(tokens))]  # fmt: skip
    expected = [len(start.decode(errors="ignore")) for start in starts]
    assert texts.offsets(tokens, text, True) == expected
    detokenizer, pieces = Detokenizer(texts, True), []
    for token_id in tokens:
        pieces.append(detokenizer.position_of(token_id))
        detokenizer.add(token_id)
    assert pieces == expected


@pytest.mark.parametrize("count", [2, 40])
def test_an_incomplete_character_has_a_position_of_its_own(
    tokenizer: Tokenizer, count: int
) -> None:
    texts = TokenTexts(tokenizer)
    comma, (first, second, *_) = token(tokenizer, ","), tokenize(tokenizer, "😀")
    tokens = [comma, first, comma, *[first] * count, comma]
    detokenizer, positions, pieces = Detokenizer(texts, True), [], []
    for token_id in tokens:
        positions.append(detokenizer.position_of(token_id))
        pieces.append(detokenizer.add(token_id))
    text = "".join([*pieces, detokenizer.flush()])
    expected_text = ",\ufffd," + "\ufffd" * count + ","
    assert (text, positions) == (expected_text, [*range(count + 4)])
    detokenizer, positions = Detokenizer(texts, True), []
    for token_id in (comma, *[first] * count, second):
        positions.append(detokenizer.position_of(token_id))
        detokenizer.add(token_id)
    assert positions == [*range(count + 1), count]


def test_stripped_spaces_and_skipped_tokens_have_no_width() -> None:
    tokenizer = VOCABULARIES["fallback"]
    tokens = [token(tokenizer, piece) for piece in ("<s>", "▁the", "▁of", "</s>", "▁a")]
    texts = TokenTexts(tokenizer)
    assert texts.offsets(tokens, "the of a", True) == [0, 0, 3, 6, 6]
    assert texts.offsets(tokens, texts.decode(tokens), False) == [0, 3, 7, 10, 14]


def test_the_offsets_of_a_prompt_never_decrease() -> None:
    tokenizer = VOCABULARIES["fallback"]
    tokens = [token(tokenizer, piece) for piece in ("sea", "</s>", "<0x9F>", "▁a")]
    texts = TokenTexts(tokenizer)
    assert texts.offsets(tokens, texts.decode(tokens, True), True) == [0, 3, 3, 3]


def suffix_vocabulary() -> Tokenizer:
    """Return a vocabulary like that of GPT-1, whose tokens mark the end of a word."""
    pieces = ["<s>", "</s>", "sea</w>", "s", "ea</w>", "the</w>", "the", ",</w>", "</w>"]
    vocabulary = {name: token for token, name in enumerate(pieces)}
    test_tokenizer = Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>"))
    test_tokenizer.decoder = decoders.BPEDecoder("</w>")
    test_tokenizer.add_special_tokens(["<s>", "</s>"])
    return test_tokenizer


def test_a_word_ends_with_a_space_that_follows_with_the_next_token() -> None:
    tokenizer, rng = suffix_vocabulary(), random.Random(0)
    texts = TokenTexts(tokenizer)
    assert [texts.bytes_of(token) for token in (2, 3, 8)] == [b"sea ", b"s", b" "]
    for _ in range(300):
        tokens = rng.choices(range(9), k=rng.randint(1, 8))
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        starts = [len(b"".join(map(texts.bytes_of, tokens[:i]))) for i in range(len(tokens))]
        assert b"".join(map(texts.bytes_of, tokens)).decode().startswith(text)
        assert texts.offsets(tokens, text, False) == [min(start, len(text)) for start in starts]
        detokenizer, pieces, positions = Detokenizer(texts, False), [], []
        for token_id in tokens:
            positions.append(detokenizer.position_of(token_id))
            pieces.append(detokenizer.add(token_id))
        assert ("".join([*pieces, detokenizer.flush()]), positions) == (text, starts)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2.5e3, None, {"b": {}, "é\n": [[], True, [False]]}], "c": "x" * 70_000},
        ["x", {"a": {str(number): number / 3 for number in range(9000)}}],
        "x" * 70_000,
    ],
)
def test_long_json_is_parsed_like_short_json(value: Any) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(f" {text} ") == value
    for wrong in (text[:-1], f"{text},", text.replace('"', "'"), "[" * 100_000):
        with pytest.raises(ValueError, match=r"."):
            parse_json(wrong)


def test_long_json_is_parsed_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert len(parse_json(json.dumps({str(number): [number] for number in range(6400)}))) == 6400
    assert pauses == [0] * 200


@pytest.mark.parametrize("words", [["the"], ["a", " se"], ["é東", "😀"], ["ababa"], ["x" * 40]])
def test_the_forbidden_tokens_complete_a_bad_word(tokenizer: Tokenizer, words: list[str]) -> None:
    texts, rng = TokenTexts(tokenizer), random.Random(0)
    bad_words = BadWords(words, texts, tokenizer.get_vocab_size())
    letters = [token for token in tokenizer.get_vocab().values() if token not in texts.special]
    likely = [*tokenize(tokenizer, "".join(words)), *tokenize(tokenizer, "the sea abab")]
    emitted_tokens: list[int] = []
    for _ in range(40):
        text = b"".join(map(texts.bytes_of, emitted_tokens))
        forbidden = set(bad_words.forbidden_after(emitted_tokens))
        completing = {
            token
            for token in letters
            if any(word.encode() in text + texts.bytes_of(token) for word in words)
        }
        assert forbidden == completing
        allowed_tokens = [token for token in likely if token not in forbidden]
        emitted_tokens.append(rng.choice(allowed_tokens or sorted(set(letters) - forbidden)))


def test_log_probabilities_have_a_line_for_each_token() -> None:
    text = encode_logprobs({"content": [{"token": "\n"}, None], "prompt": []})
    assert text == b'{"content":[\n{"token":"\\n"},\nnull\n],"prompt":[\n\n]}'
