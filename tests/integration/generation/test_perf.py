"""`shmserve perf --openai` against models that generate text."""

import json
from pathlib import Path

import pytest

from shmserve.cli import main
from tests.support.servers import Server


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_tokens_are_counted_and_timed(generative: Server, tmp_path: Path, route: str) -> None:
    path = tmp_path / "report.json"
    arguments = ["--openai", route, "--max-tokens=6", "--prompt-words=4", "--concurrency=2"]
    short_flags = ["--window=0.3", "--windows=3", "--warm-up=0.1", f"--json={path}"]
    assert main(["perf", "tiny", f"--url=http://{generative.url}", *arguments, *short_flags]) == 0
    (point,) = json.loads(path.read_text())["points"]
    assert (point["errors"], point["error"]) == (0, "")
    # The server's count of tokens, not the number of chunks: some tokens have no text yet.
    tokens = round(point["responses_per_second"] / point["per_second"], 6)
    assert 1 < tokens <= 6
    assert 0 < point["first"]["p50"] < point["latency"]["max"]


def test_request_bodies_are_read_from_a_file(
    generative: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a b", "stream": false, "temperature": -7}\n')
    arguments = ["--openai=completions", f"--data={tmp_path}/d.jsonl"]
    assert main(["perf", "tiny", f"--url=http://{generative.url}", *arguments]) == 1
    assert "temperature" in capsys.readouterr().err
