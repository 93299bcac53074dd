"""Which requests are traced: one of so many, until there were so many (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shmserve.common.trace_settings import OPENTELEMETRY, TraceSettings


@dataclass(slots=True, eq=False)
class Sampler:
    """The sampler of a model, or of all that have none of their own. `left`: how many more are
    traced, -1: any number; `pending`: traces that are still to be written."""

    settings: TraceSettings
    left: int = field(init=False)
    pending: list[Any] = field(default_factory=list)
    _seen: int = 0
    _on: bool = field(init=False)

    def __post_init__(self) -> None:
        self.left, self._on = self.settings.trace_count, self.settings.on

    def samples(self, decided: bool | None) -> bool:
        """Whether the next request is traced: for OpenTelemetry as its caller has `decided`, None
        where it has none."""
        if decided is None or self.settings.trace_mode != OPENTELEMETRY:
            return self.take()
        return decided and self.count()

    def take(self) -> bool:
        """Whether the next request is traced."""
        if not self._on:
            return False
        self._seen += 1
        return not self._seen % self.settings.trace_rate and self.count()

    def count(self) -> bool:
        """Whether one that is to be traced is, which counts then."""
        if not self._on or not self.left:
            return False
        if self.left > 0:
            self.left -= 1
        return True


@dataclass(slots=True, eq=False)
class Samplers:
    """The samplers by model; "": of all others."""

    _by_model: dict[str, Sampler] = field(default_factory=lambda: {"": Sampler(TraceSettings())})

    def of(self, model: str) -> Sampler:
        """The sampler of a model."""
        return self._by_model.get(model) or self._by_model[""]

    @property
    def on(self) -> bool:
        """Whether any model is traced."""
        return any(sampler.settings.on for sampler in self._by_model.values())

    @property
    def all(self) -> list[Sampler]:
        """Each of them."""
        return list(self._by_model.values())

    def set(self, settings: dict[str, dict[str, Any]]) -> None:
        """Sample like this from now on; those whose settings are the same count on."""
        before, self._by_model = self._by_model, {}
        for model, given in settings.items():
            made = Sampler(TraceSettings(**given))
            kept = before.get(model)
            self._by_model[model] = kept if kept and kept.settings == made.settings else made
