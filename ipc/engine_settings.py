"""The settings of a generative model's engine: the keys of `engine.yaml`, all validated at once.

The worker reads the file and completes it with limits from its memory. The scheduler receives the
result as the JSON of the model's parameter `engine`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, NamedTuple, Self

from shmserve.errors import InvalidArgument, suggestion

LLM_BACKEND = "llm"  # the name of the backend for generative models
ENGINE_PARAMETER = "engine"
# The start of the error about a prompt that is too long. The gateway recognises the error by this
# text, and adds the code that OpenAI's API defines for it.
PROMPT_TOO_LONG = "this model's maximum context length is"
# Parameters of requests that are accepted and do not affect the generated text.
IGNORED_PARAMETERS = (
    *("user", "metadata", "request_id", "spaces_between_special_tokens", "guided_decoding_backend"),
    *("guided_backend", "session_id", "stream_interval", "service_tier"),
    # Members of vLLM's sampling parameters that affect only its Python API or its prefix cache.
    *("flat_logprobs", "output_kind", "skip_clone", "skip_reading_prefix_cache"),
)
# Parameters of vLLM that are refused unless their value is empty.
UNSUPPORTED_PARAMETERS = (
    *("logits_processors", "mm_processor_kwargs", "media_io_kwargs", "kv_transfer_params"),
    *("vllm_xargs", "extra_args", "repetition_detection", "lora_request"),
    *("logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
    *("ec_transfer_params", "trace_decode_token_ids"),
)
SCHEDULING_POLICIES = ("fcfs", "sjf", "priority")
PREEMPTION_MODES = ("swap", "recompute", "auto")
MAX_MODEL_LEN = 1 << 24
_SMALL_STEP_DEFAULTS = {
    "max_batch_size": 8,
    "max_tokens_per_batch": 512,
    "prefill_chunk_size": 128,
    "max_prefill_tokens": 256,
}
# The defaults of each profile.
PROFILES: Mapping[str, Mapping[str, Any]] = {
    "high_throughput": {
        "max_batch_size": 64,
        "max_tokens_per_batch": 4096,
        "prefill_chunk_size": 1024,
        "max_prefill_tokens": 4096,
    },
    "low_latency": {**_SMALL_STEP_DEFAULTS, "target_itl_ms": 50.0},
    "memory_constrained": {
        **_SMALL_STEP_DEFAULTS,
        "preemption_mode": "recompute",
        "swap_space_gb": 0.0,
        "kv_cache_blocks": 256,
    },
}

# Formats of tool calls and of reasoning, by vLLM's names.
TOOL_PARSERS = (
    *("hermes", "llama3_json", "llama4_json", "llama4_pythonic", "mistral", "pythonic"),
    *("qwen3_coder", "qwen3_xml"),
)
REASONING_PARSERS = ("deepseek_r1", "mistral", "qwen3")


def _number(default: float, minimum: float, maximum: float) -> Any:
    """Return a dataclass field for a number from `minimum` to `maximum`."""
    return field(default=default, metadata={"allowed": (minimum, maximum)})


def _choice(default: str, *allowed_texts: str) -> Any:
    """Return a dataclass field for one of the `allowed_texts`."""
    return field(default=default, metadata={"allowed": allowed_texts})


class _Problem(NamedTuple):
    key: str  # of the setting
    text: str


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """The settings of speculative decoding.

    Attributes:
        enabled: Whether tokens are proposed.
        method: "ngram" proposes the tokens that followed an earlier occurrence of the last tokens;
            "draft" uses the draft model.
        draft_model: The name of a model in the repository, or a path.
        num_spec_tokens: The maximum number of proposed tokens.
        adaptive_length: Whether the number of proposed tokens adapts to their acceptance.
        accept_threshold: The acceptance rate below which proposals are paused.
    """

    enabled: bool = False  # whether drafts are proposed
    method: str = _choice("ngram", "draft", "ngram")
    draft_model: str = ""
    num_spec_tokens: int = _number(4, 1, 32)  # number of draft tokens
    adaptive_length: bool = True
    accept_threshold: float = _number(0.3, 0, 1)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine. Sizes are in tokens, sequences, or blocks of `block_size` tokens.

    Attributes:
        aliases: Further names of the model in OpenAI's API.
        max_model_len: The maximum length of a sequence; 0: limited by memory only.
        kv_cache_blocks: The number of KV blocks; 0: as many as fit into memory.
        target_itl_ms: The target of the inter-token latency in ms, which limits the size of prompt
            chunks. With 0, the target is 50 ms, but chunks of up to 64 tokens may exceed it.
        max_wait_time_ms: The waiting time after which a request precedes all others; 0: none.
        swap_blocks: The number of blocks of the host pool, derived from `swap_space_gb`.
        tool_parser: The format of tool calls; "": the chat template's; "none": none.
        reasoning_parser: The format of reasoning; "": the chat template's; "none": none.
    """

    profile: str = _choice("", "", *PROFILES)  # a preset of the other settings, or ""
    aliases: tuple[str, ...] = ()  # further names of the model for clients
    max_batch_size: int = _number(32, 1, 1024)  # sequences
    max_tokens_per_batch: int = _number(2048, 1, 1 << 20)
    max_waiting_requests: int = _number(512, 1, 1 << 20)
    max_model_len: int = _number(0, 0, MAX_MODEL_LEN)
    scheduling_policy: str = _choice("fcfs", *SCHEDULING_POLICIES)
    prefill_chunk_size: int = _number(512, 1, 1 << 20)  # tokens
    max_prefill_tokens: int = _number(2048, 1, 1 << 20)
    enable_prefix_caching: bool = True
    enable_preemption: bool = True
    preemption_mode: str = _choice("auto", *PREEMPTION_MODES)
    swap_space_gb: float = _number(0.25, 0, 4096)  # of host memory
    swap_blocks: int = _number(0, 0, 1 << 24)  # number, derived from `swap_space_gb`
    block_size: int = _number(16, 1, 1024)  # tokens
    kv_cache_blocks: int = _number(0, 0, 1 << 24)  # number; 0: as many as fit
    target_itl_ms: float = _number(0.0, 0, 1e6)
    max_wait_time_ms: float = _number(30_000.0, 0, 1e9)
    weights: str = _choice("fp32", "fp32", "bf16", "int8")
    tool_parser: str = _choice("", "", "none", *TOOL_PARSERS)
    reasoning_parser: str = _choice("", "", "none", *REASONING_PARSERS)
    speculative_decoding: SpeculationSettings = field(default_factory=SpeculationSettings)

    @classmethod
    def of(
        cls,
        document: Mapping[str, Any],
        origin: str = "engine settings",
        key_positions: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the settings in a document, with the defaults of its profile.

        Args:
            document: The document.
            origin: The name of the document in error texts.
            key_positions: The position of each key ("3:1"), if known.

        Raises:
            InvalidArgument: Settings are invalid. The message has a line for each:
                `ORIGIN:POSITION: KEY:`, the value found, and the values allowed.
        """
        if not isinstance(document, Mapping):
            raise InvalidArgument(f"{origin}: {document!r:.80} is not a mapping")
        problems: list[_Problem] = []
        profile = document.get("profile", "")
        given_settings = _valid_settings(cls, document, "", problems)
        values = {**PROFILES.get(str(profile), {}), **given_settings}
        speculation = document.get("speculative_decoding", {})
        if not isinstance(speculation, Mapping):
            problems.append(_invalid_value("speculative_decoding", speculation, "a mapping"))
        else:
            prefix = "speculative_decoding."
            speculation_values = _valid_settings(SpeculationSettings, speculation, prefix, problems)
            values["speculative_decoding"] = SpeculationSettings(**speculation_values)
        settings = cls(**values)
        if not problems:  # an invalid value could also contradict valid ones
            problems += settings._contradictions()
        if problems:
            positions = (key_positions or {}).items()
            locations = {key: f"{origin}:{position}" for key, position in positions}
            lines = (f"{locations.get(key, origin)}: {key}: {text}" for key, text in problems)
            raise InvalidArgument("\n".join(lines))
        return settings

    @classmethod
    def read(cls, json_text: str) -> Self:
        """Return the settings in a JSON text that `json_text` has returned."""
        return cls.of(json.loads(json_text))

    @property
    def json_text(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def capacity(self) -> int:
        """Return the number of tokens whose keys and values fit into the KV cache."""
        return self.kv_cache_blocks * self.block_size

    def _contradictions(self) -> Iterator[_Problem]:
        speculation = self.speculative_decoding
        if speculation.enabled and speculation.method == "draft" and not speculation.draft_model:
            problem_text = "method 'draft' requires the name or the path of a draft model"
            yield _Problem("speculative_decoding.draft_model", problem_text)
        if self.max_tokens_per_batch < self.max_batch_size:
            problem_text = (
                f"{self.max_tokens_per_batch} is less than max_batch_size {self.max_batch_size}; "
                "each sequence of a batch needs one token in a step"
            )
            yield _Problem("max_tokens_per_batch", problem_text)


def _valid_settings(
    settings_class: type[Any], settings: Mapping[str, Any], prefix: str, problems: list[_Problem]
) -> dict[str, Any]:
    """Return the valid settings, converted to their types; add errors to `problems`."""
    settings_by_name = {setting.name: setting for setting in fields(settings_class)}
    valid_settings: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in settings_by_name:
            allowed_text = f" (allowed: {', '.join(sorted(settings_by_name))})"
            allowed_text = suggestion(str(name), settings_by_name) or allowed_text
            problems.append(_Problem(f"{prefix}{name}", f"no such setting{allowed_text}"))
        elif name != "speculative_decoding":
            setting = settings_by_name[name]
            allowed_values = _allowed_values(setting, value)
            if allowed_values:
                problems.append(_invalid_value(prefix + name, value, allowed_values))
            else:
                convert: type[Any] = type(setting.default)
                valid_settings[name] = convert(value)
    return valid_settings


def _allowed_values(setting: Field[Any], value: Any) -> str:
    """Return the text of the allowed values if `value` is invalid, otherwise ""."""
    default, values = setting.default, setting.metadata.get("allowed", ())
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        if not isinstance(value, str):
            return "a string"
        if not values or value in values:
            return ""
        return f"one of {', '.join(filter(None, values))}{suggestion(value, values)}"
    if isinstance(default, tuple):
        is_list = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
        return "" if is_list else "a list of names"
    minimum, maximum = values
    is_integer = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if is_integer else (int, float)):
        return "an integer" if is_integer else "a number"
    return "" if minimum <= value <= maximum else f"{minimum:g} to {maximum:g}"


def _invalid_value(name: str, value: Any, allowed_text: str) -> _Problem:
    return _Problem(name, f"{value!r} is not {allowed_text}")


def prompt_too_long_text(limit: int, explanation: str) -> str:
    """Return the error text about a prompt that is longer than `limit` tokens.

    Clients recognise the error by the words and the number with which OpenAI's message begins, or
    by "prompt is too long" (LangChain).
    """
    return f"{PROMPT_TOO_LONG} {limit} tokens, and the prompt is too long: {explanation}"
