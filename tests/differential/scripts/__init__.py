"""All scripts, by scheduler; a group shares one start of each server."""

from __future__ import annotations

from tests.differential.scripts import (
    cached,
    delayed,
    dynamic,
    ensembles,
    priority,
    sequences,
    streams,
)

GROUPS = [
    dynamic.GROUP,
    priority.GROUP,
    sequences.GROUP,
    ensembles.GROUP,
    streams.GROUP,
    cached.GROUP,
    *delayed.GROUPS,
]
