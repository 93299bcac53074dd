"""Restart backoff: the pause before a process that died is started again, longer each time it keeps
dying (pure)."""

from __future__ import annotations

from dataclasses import dataclass

# Pauses before a start after the n-th death in a row.
_PAUSES_S = (0.0, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
_HEALTHY_S = 30.0


@dataclass(slots=True)
class RestartBackoff:
    """Deaths in a row; a life of more than 30 seconds ends the row."""

    deaths: int = 0

    def pause_s(self, lived_s: float) -> float:
        """Seconds to wait before the next start, after a death; 0 seconds are lived by what did not
        come up at all."""
        self.deaths = 1 if lived_s > _HEALTHY_S else self.deaths + 1
        return _PAUSES_S[min(self.deaths, len(_PAUSES_S)) - 1]
