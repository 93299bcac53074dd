"""Dependencies of ensembles: their steps' models are loaded before them, never twice at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.registry import LoadSource, ModelRegistry
from shmserve.supervisor.processes.scheduler_hosts import Group


@dataclass(slots=True, eq=False)
class Dependencies:
    """Loads the models of ensembles' steps with `load(name)`, unless they serve. `hosted`: they are
    scheduled beside their ensembles."""

    _planner: LoadPlanner
    _registry: ModelRegistry
    _load: Callable[[str], Awaitable[None]]
    _hosted: bool = True
    _loading: dict[str, asyncio.Future[None]] = field(init=False, default_factory=dict)
    # Of ensembles that are to serve when they can.
    _steps_of: dict[str, list[str]] = field(init=False, default_factory=dict)
    # Loaded for an ensemble, and by nobody's wish.
    _for_others: set[str] = field(init=False, default_factory=set)

    @contextlib.contextmanager
    def loading(self, names: list[str]) -> Iterator[None]:
        """Enter models that are about to be loaded: whoever needs one waits until it is
        `loaded`."""
        loop = asyncio.get_running_loop()
        began = {name: loop.create_future() for name in names if name not in self._loading}
        self._loading.update(began)
        try:
            yield
        finally:
            for name in began:
                self.loaded(name)

    def loaded(self, name: str) -> None:
        """Wake those who wait for a load: it has ended, well or not."""
        future = self._loading.pop(name, None)
        if future is not None:
            future.set_result(None)

    async def satisfy(self, name: str, source: LoadSource) -> None:
        """Load what a model needs, if it is an ensemble. What cannot be loaded, whoever looks at
        the ensemble's graph will miss. Raises InvalidArgument where ensembles need one another."""
        steps = await asyncio.to_thread(self._steps, name, source.config)
        self.set_needs(name, steps)
        for step in steps:
            await asyncio.to_thread(self._check_circles, step, [name])
        await asyncio.gather(*map(self._ensure, steps))

    def needs(self, name: str) -> list[str]:
        """The models of an ensemble's steps, as it was to serve last; none of any other model."""
        return self._steps_of.get(name, [])

    def set_needs(self, name: str, steps: list[str]) -> None:
        """Have an ensemble need these models from now on; none: it is no ensemble."""
        if steps:
            self._steps_of[name] = steps
        else:
            self._steps_of.pop(name, None)

    async def _ensure(self, name: str) -> None:
        while (coming := self._loading.get(name)) is not None:
            await asyncio.shield(coming)
        model = self._registry.get(name)
        if model is not None and model.serving:
            return
        self._for_others.add(name)
        with contextlib.suppress(ShmserveError):
            await self._load(name)

    def to_load_after(self, name: str, changed: bool) -> list[str]:
        """The ensembles to load once a model was: those that lacked it, and if it has `changed`,
        all that need it; none that is being loaded."""
        found: list[str] = []
        for ensemble, steps in self._steps_of.items():
            if name in steps and ensemble not in self._loading:
                model = self._registry.get(ensemble)
                if changed or model is None or not model.serving:
                    found.append(ensemble)
        return found

    async def expect(self, names: Iterable[str]) -> None:
        """Look at the graphs of what is about to be loaded: where a step is scheduled depends on
        the ensembles that have it."""
        found = await asyncio.to_thread(lambda: {name: self._steps(name) for name in names})
        self._steps_of.update({name: steps for name, steps in found.items() if steps})

    def group(self, name: str) -> Group:
        """The models that are scheduled in one process with this one: a connected component of
        ensembles and their steps, or it alone."""
        names = self._component(name) if self._hosted else {name}
        ensembles = names & self._steps_of.keys()
        steps = {step for ensemble in ensembles for step in self._steps_of[ensemble]}
        outermost = sorted(ensembles - steps)
        title = f"ensemble {outermost[0]}" if outermost else f"scheduler {name}"
        return Group(title, frozenset(names))

    def _component(self, name: str) -> set[str]:
        names, waiting = {name}, [name]
        while waiting:
            known = waiting.pop()
            near = set(self._steps_of.get(known, ()))
            near |= {ensemble for ensemble, steps in self._steps_of.items() if known in steps}
            waiting += near - names
            names |= near
        return names

    def wanted_itself(self, name: str) -> None:
        """Note that a request asked for this model."""
        self._for_others.discard(name)

    def not_wanted(self, name: str) -> None:
        """Note that a request asked for its end."""
        self._steps_of.pop(name, None)
        self._for_others.discard(name)

    def loaded_for(self, name: str) -> list[str]:
        """The steps of an ensemble that were loaded for it, and are no other's."""
        others = {
            step for ensemble, steps in self._steps_of.items() if ensemble != name for step in steps
        }
        steps = self._steps_of.get(name, [])
        return [step for step in steps if step in self._for_others and step not in others]

    def _steps(self, name: str, override: str = "") -> list[str]:
        return list(dict.fromkeys(step.name for step in self._planner.steps(name, override)))

    def _check_circles(self, name: str, above: list[str]) -> None:
        if name in above:
            circle = " -> ".join([*above[above.index(name) :], name])
            raise InvalidArgument(f"circular dependency between ensembles: {circle}")
        # Of what serves, or is to, that; it may be another than the folder's.
        for step in self.needs(name) or self._steps(name):
            self._check_circles(step, [*above, name])
