"""Which part of a model's configuration makes its deployment: what cannot change while it serves.
The rest can: how many instances there are and where, and which versions are loaded.
"""

from __future__ import annotations

from typing import Any

_CHANGES_IN_PLACE = frozenset({"instance_group", "version_policy"})


def immutable_config(config: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration, as `model_config.to_dict` gives it, a deployment is made for."""
    return {key: value for key, value in config.items() if key not in _CHANGES_IN_PLACE}
