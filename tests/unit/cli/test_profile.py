"""The output of `shmserve profile` about the steps of a model."""

import argparse
from pathlib import Path
from unittest.mock import Mock
from urllib.request import Request

import pytest

from shmserve.cli import profile
from shmserve.errors import InvalidArgument, Unavailable

PHASES = {"schedule": 0.1, "gather": 0.1, "draft": 0.0, "forward": 1.6, "sample": 0.2, "text": 0.4}
PROFILE = profile.Profile(2.0, 100, 400, 400, PHASES, [180.0, 220.0])


def test_step_time_is_divided_among_phases() -> None:
    title, _, *rows = profile.format_table("m", PROFILE).splitlines()
    assert "100 steps in 2.0 s, 4.0 sequences per step, 200.0 tokens/s" in title
    shown_phases = {row.split()[0]: row.split()[1:3] for row in rows}
    # Work beside the steps is not part of them.
    assert shown_phases["forward"] == ["16.000", "80.0%"]
    assert shown_phases["text"] == ["4.000", "20.0%"]


def test_a_profile_without_steps_is_valid() -> None:
    empty_profile = profile.Profile(1.0, 0, 0, 0, dict.fromkeys(PHASES, 0.0), [0.0])
    table = profile.format_table("m", empty_profile)
    assert "m: 0 steps in 1.0 s: the model generated nothing" in table
    assert "--url http://HOST:PORT" in table
    assert "shmserve perf m --openai chat" in table and "ms per step" not in table


def test_an_interrupt_prints_the_profile_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A page of another version of the server may lack any metric.
    page = 'data:,shmserve_llm_x{model="m"} 1'
    monkeypatch.setattr("time.sleep", Mock(side_effect=KeyboardInterrupt))
    request = argparse.Namespace(
        model="m", seconds=60.0, metrics_url=page, token_file=None, plot=None
    )
    assert profile.run(request) == 130
    assert capsys.readouterr().out.startswith("m: 0 steps in 0.0 s")


def test_the_picture_is_written(tmp_path: Path) -> None:
    profile.plot(str(tmp_path / "m.png"), "m", PROFILE)
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"^--plot: cannot write '/nowhere/m.png': No such"):
        profile.plot("/nowhere/m.png", "m", PROFILE)
    with pytest.raises(InvalidArgument, match=r"m.doc': the format must be .png or .svg"):
        profile.plot(str(tmp_path / "m.doc"), "m", PROFILE)


def test_a_missing_server_is_named() -> None:
    request = argparse.Namespace(
        model="m", seconds=1.0, metrics_url="http://127.0.0.1:9/metrics", token_file=None, plot=None
    )
    with pytest.raises(Unavailable, match=r"^http://127\.0\.0\.1:9/metrics: \[Errno 111\]"):
        profile.run(request)
    request.metrics_url = "http://127.0.0.1:9"
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9/metrics"):
        profile.run(request)
    request.metrics_url = "data:text/html,<!doctype html>"
    with pytest.raises(InvalidArgument, match=r"does not return metrics: .*<!doctype html>"):
        profile.run(request)


def test_the_token_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[str] = []

    def watch(request: Request, *_: object) -> profile.Profile:
        tokens.append(request.headers["Authorization"])
        return PROFILE

    monkeypatch.setattr(profile, "watch", watch)
    file = tmp_path / "tokens"
    file.write_text("# of the metrics\nsecret metrics\n")
    request = argparse.Namespace(
        model="m", seconds=1.0, metrics_url="http://127.0.0.1:9", token_file=str(file), plot=None
    )
    assert profile.run(request) == 0
    request.token_file = str(tmp_path / "missing")
    with pytest.raises(InvalidArgument, match="--token-file: cannot read"):
        profile.run(request)
    assert tokens == ["Bearer secret"]
