"""`shmserve grafana`: a Grafana dashboard (dashboard.json) and alert rules (alerts.yaml)."""

from __future__ import annotations

import argparse
from pathlib import Path


def run(args: argparse.Namespace) -> int:
    """Print the dashboard, or with `--alerts` the alert rules; return 0."""
    name = "alerts.yaml" if args.alerts else "dashboard.json"
    print(Path(__file__).with_name(name).read_text(), end="")
    return 0
