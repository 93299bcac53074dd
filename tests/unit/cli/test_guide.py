"""`shmserve guide`: pages from files, and pages generated from the objects that they describe."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmserve.client
from shmserve import cli
from shmserve.cli import guide
from shmserve.client import aio
from shmserve.config.flags import FLAGS

FOLDER = Path(__file__).resolve().parents[3] / "shmserve"


@pytest.mark.parametrize("topic", ["batching", "Trust", "protocol"])
def test_a_page_is_printed(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["guide", topic]) == 0
    assert capsys.readouterr().out.startswith("# ")


def test_without_a_topic_the_contents_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["guide"]) == 0
    captured = capsys.readouterr().out
    for page in (FOLDER / "guide").glob("*.md"):
        assert page.stem == "contents" or f"`shmserve guide {page.stem}`" in captured
    assert "`shmserve guide protocol`" in captured and "`client`" in captured
    assert "`flags`" in captured


def test_tables_are_columns_of_text() -> None:
    page = """\
Text with a | bar.

| name | |
|---|---|
| `a` | one \\| two |
| bcd | words that do not fit into the width |
| ef | |

```text
| code | stays |
```
| | |
|---|---|
| x | y |
"""
    assert guide.with_columns(page, 24).splitlines() == [
        "Text with a | bar.", "", "name", "----  ------------------", "`a`   one | two",
        "bcd   words that do not", "      fit into the width", "", "ef", "", "```text",
        "| code | stays |", "```", "-  -", "x  y",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 140])
def test_no_table_is_wider_than_the_terminal(width: int) -> None:
    for topic in guide._pages():
        text = guide.page(topic)
        kept_lines = set(text.splitlines())
        for line in guide.with_columns(text, width).splitlines():
            assert line in kept_lines or len(line) <= width, topic


def test_in_a_terminal_a_pager_shows_it() -> None:
    terminal, tty = os.openpty()
    command = [sys.executable, "-m", "shmserve", "guide", "models"]
    environment = {**os.environ, "PAGER": "sed 's/^# /shown: /;q'", "TERM": "xterm"}
    with os.fdopen(terminal, "rb") as screen:
        subprocess.run(command, stdin=tty, stdout=tty, env=environment, check=True)
        os.close(tty)
        assert screen.readline().startswith(b"shown: Models and classes")


@pytest.mark.parametrize(("topic", "nearest"), [("bathing", "batching"), ("flag", "flags")])
def test_an_unknown_topic_gets_the_nearest(
    topic: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["guide", topic]) == 2
    error = capsys.readouterr().err
    assert f"there is no page '{topic}', did you mean '{nearest}'? `shmserve guide` lists" in error


def test_an_unknown_topic_gets_a_pointer_to_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for topic in ("0000", "nope"):
        assert cli.main(["guide", topic]) == 2
        message = f"there is no page '{topic}'; `shmserve guide` lists the pages\n"
        assert capsys.readouterr().err.endswith(message)


BEST_PAGES = {
    **dict.fromkeys(("FastAPI", "Flask"), "web"),
    **dict.fromkeys(("Docker", "Jetson", "systemd", "uninstall", "upgrade"), "deployment"),
    **dict.fromkeys(("kubernetes", "zero downtime", "install", "rotation"), "deployment"),
    **dict.fromkeys(("nginx", "CORS", "token", "TLS", "firewall", "401"), "security"),
    **dict.fromkeys(("priority", "warmup", "timeout", "rate limit"), "batching"),
    **dict.fromkeys(("hot reload", "traceback", "profiling", "breakpoint"), "debug"),
    **dict.fromkeys(("notebook", "Jupyter", "JPEG", "asyncio"), "clients"),
    **dict.fromkeys(("streaming", "scale to zero", "SSE"), "models"),
    **dict.fromkeys(("out of memory", "429", "OOM", "memory leak"), "troubleshooting"),
    **dict.fromkeys(("prometheus", "grafana", "liveness"), "observability"),
    **dict.fromkeys(("autoscaling", "autoscale"), "instances"),
    **dict.fromkeys(("load balancing", "Ray"), "scaling"),
    **dict.fromkeys(("OpenAI", "tool calling", "LLM"), "generation"),
    **dict.fromkeys(("conda", "virtualenv", "ONNX", "lora", "BLS"), "backends"),
    **{
        name: name for name in ("debug", "camera", "troubleshooting", "sequences", "perf", "faults")
    },
    **dict.fromkeys(("port", "arm", "macOS", "Windows", "requirements", "arm64"), "deployment"),
    **dict.fromkeys(("upload", "base64", "Rust", "cancel", "shared memory"), "clients"),
    **dict.fromkeys(("ulimit", "cold start", "address already in use"), "troubleshooting"),
    **dict.fromkeys(("tracing", "logs"), "observability"),
    **dict.fromkeys(("embeddings", "reasoning"), "generation"),
    **dict.fromkeys(("authentication", "DNS rebinding", "API key"), "security"),
    **dict.fromkeys(("graceful shutdown", "compose"), "deployment"),
    **dict.fromkeys(("rate limiting", "quota", "dynamic batching"), "batching"),
    **dict.fromkeys(("stdout", "segfault"), "debug"),
    **dict.fromkeys(("canary", "A/B", "sklearn", "xgboost"), "models"),
    "zero copy": "clients",
    "health check": "observability",
    "GPU": "gpu",
    "slow": "debug",
    "video": "camera",
    "benchmark": "measurements",
    "multi-GPU": "instances",
    "pytest": "testing",
    "crash": "faults",
    "retry": "faults",
    "quantization": "checkpoints",
    "padding": "shapes",
    "pipeline": "backends",
}


@pytest.mark.parametrize("search_words", BEST_PAGES)
def test_searches_list_the_best_page(search_words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["guide", "--search", search_words]) == 0
    page_names = re.findall(r"^shmserve guide (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert BEST_PAGES[search_words] in page_names[:3]


def test_a_comment_of_a_code_block_is_not_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `shmserve tune` in the guide begins with `#`."""
    assert cli.main(["guide", "--search", "within", "30", "ms"]) == 0
    assert "shmserve guide tune   slow, p99 within" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [["out of memory"], ["out", "of", "memory"]])
def test_words_may_be_one_argument_or_several(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["guide", "--search", *words]) == 0
    assert capsys.readouterr().out.startswith("shmserve guide troubleshooting ")


def test_a_search_without_a_result_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["guide", "--search", "xyzzy"]) == 2
    assert "no section has 'xyzzy'" in capsys.readouterr().err


def test_every_flag_is_on_its_page() -> None:
    page = guide.page("flags")
    assert all(f"--{flag.name}" in page for flag in FLAGS.values())


def test_the_clients_reference_has_the_whole_public_api() -> None:
    page = guide.page("client")
    for name in shmserve.client.__all__:
        assert f"shmserve.client.{name}" in page or f"\n{name}(" in page
    for kind in (shmserve.client.Server, aio.Server):
        for name, method in vars(kind).items():
            if not name.startswith("_"):
                assert f"{kind.__name__}.{name}(" in page
                assert (inspect.getdoc(method) or "").splitlines()[0] in page
    assert "self" not in page
