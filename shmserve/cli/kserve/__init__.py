"""`shmserve kserve`: the manifest of a KServe ServingRuntime (runtime.yaml)."""

from __future__ import annotations

import argparse
from pathlib import Path

from shmserve import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    text = "the container image with shmserve [%(default)s]"
    parser.add_argument("--image", default=f"shmserve:{__version__}", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the manifest; return 0."""
    print(Path(__file__).with_name("runtime.yaml").read_text().replace("IMAGE", args.image), end="")
    return 0
