"""All scripts, by scheduler; a group shares one start of each server."""

from tests.differential.scripts import (
    cached,
    cancelled,
    delayed,
    dynamic,
    ensembles,
    limited,
    priority,
    sequences,
    streams,
    waiting_sequences,
)

GROUPS = [
    dynamic.GROUP, priority.GROUP, sequences.GROUP, waiting_sequences.GROUP, ensembles.GROUP,
    streams.GROUP, cached.GROUP, cancelled.GROUP, *limited.GROUPS, *delayed.GROUPS,
]  # fmt: skip
