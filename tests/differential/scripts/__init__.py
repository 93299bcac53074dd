"""All scripts, by scheduler; a group shares one start of each server."""

from __future__ import annotations

from tests.differential.scripts import dynamic, priority, sequences

GROUPS = [dynamic.GROUP, priority.GROUP, sequences.GROUP]
