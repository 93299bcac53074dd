"""Trains a small language model, serves it, and measures it.

    python examples/generation/demo.py

It prints a text, and the tokens per second, the time to the first token and the time between two
tokens at 1, 8 and 32 clients. It ends by itself, leaves nothing behind, and needs no network.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import shmserve

_READY_WITHIN_S = 90.0
_TRAINING_S = float(os.environ.get("TRAINING_SECONDS", "120"))
_CLIENTS = (1, 8, 32)
_TOKENS = 48
_PROMPTS = (
    "The import statement",
    "A class definition is",
    "When an exception is raised,",
    "The following table",
)
_ROW = "{:>8}{:>11}{:>14}{:>14}{:>14}{:>14}"
_HEADER = ("clients", "tokens/s", "first p50 ms", "first p99 ms", "between p50", "between p99")


@dataclass
class Measured:
    """The measurements of one load; times are in seconds.

    Attributes:
        first: The times from the requests to their first tokens.
        between: The times between two successive tokens.
        tokens: The number of generated tokens.
        seconds: The duration of the load.
    """

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def main() -> None:
    """Train and serve the model, print texts, and measure it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    # Exits through the clean-up that stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="shmserve-demo-") as folder:
        # Otherwise torch leaves this folder behind.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/torch"
        import train  # imported late, because its imports read the variable

        model = Path(folder) / "reference"
        print("training a small language model on Python's reference ...", flush=True)
        train.write(model, _TRAINING_S, draft=False)
        with shmserve.serve(model, timeout=_READY_WITHIN_S) as server:
            port = urllib.parse.urlsplit(server.url).port or 0
            print("\nit writes:\n")
            for prompt in _PROMPTS[:2]:
                text = "".join(piece for piece, _ in stream(port, prompt, 40))
                print(f"    {prompt}{text}".replace("\n", "\n    "), "\n")
            print(_ROW.format(*_HEADER), flush=True)
            for clients in _CLIENTS:
                print(_row(clients, measure(port, clients)), flush=True)


def _row(clients: int, measured: Measured) -> str:
    times = (measured.first, measured.between)
    cells = [f"{quantile(times_s, q) * 1e3:,.1f}" for times_s in times for q in (0.5, 0.99)]
    return _ROW.format(clients, f"{measured.tokens / measured.seconds:,.0f}", *cells)


def quantile(values: list[float], share: float) -> float:
    """Return the value below which this share of the values is."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def measure(port: int, clients: int) -> Measured:
    """Measure `clients` concurrent clients with two requests each."""
    measured = Measured()
    lock = threading.Lock()

    def run(number: int) -> None:
        for turn in range(2):
            prompt = _PROMPTS[(number + turn) % len(_PROMPTS)]
            sent_s = last_s = time.monotonic()
            for _, at in stream(port, prompt, _TOKENS):
                with lock:
                    (measured.first if last_s == sent_s else measured.between).append(at - last_s)
                last_s = at
            with lock:
                measured.tokens += _TOKENS

    start_s = time.monotonic()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured.seconds = time.monotonic() - start_s
    return measured


def stream(port: int, prompt: str, tokens: int) -> Iterator[tuple[str, float]]:
    """Yield the pieces of a completion, each with its time of arrival (monotonic seconds)."""
    body = {
        "model": "reference",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.7,
        "top_p": 0.95,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the server responded with {response.status}: {response.read()!r}")
        for line in response:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                yield choice["text"], time.monotonic()


if __name__ == "__main__":
    main()
