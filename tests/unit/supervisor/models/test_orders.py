"""Orders of models that need each other, and the states published meanwhile."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.errors import InvalidArgument, NotFound, Unavailable
from shmserve.ipc.messages import publications as m
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models import instance as instance_module
from shmserve.supervisor.models import instances
from shmserve.supervisor.models.load_planner import StepModel, VersionSpec, steps_of
from shmserve.supervisor.models.manager import LifecycleExecutor, ModelManager, ModelPublisher
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.repository import ModelFolder
from shmserve.supervisor.reload import RepositoryPoller
from tests.rigs.process_rig import CONFIG, Processes, run_loop_turns
from tests.support.waiting import until_async


def make_config(name: str, steps: list[str], marker: str) -> ModelSpec:
    """Return a model, or an ensemble of models; `marker` makes configurations differ."""
    fields: Any = {**CONFIG, "name": name, "parameters": {"note": {"string_value": marker}}}
    if steps:
        fields["instance_group"] = []
        step = {"model_version": -1, "input_map": {}, "output_map": {}}
        fields["ensemble_scheduling"] = {"step": [{"model_name": name, **step} for name in steps]}
    return ModelSpec.of(fields)


class Repository:
    """A planner of models with the models of their steps; an override is [steps, note] in JSON."""

    def __init__(self, **models: list[str]) -> None:
        self.models = models
        self.versions = ["1"]
        self.files: dict[str, str] = {}  # the changed files of each version
        self.read: list[str] = []

    def scan(self) -> dict[str, ModelFolder]:
        return {name: ModelFolder(name, Path("/") / name) for name in self.models}

    def count_repositories(self, name: str) -> int:
        return int(name in self.models)

    def fingerprint(self, name: str) -> str:
        return json.dumps([self.versions, self.files])

    def _config(self, name: str, override: str) -> ModelSpec:
        if name not in self.models:
            raise NotFound("there is no such model folder")
        steps, marker = json.loads(override) if override else (self.models[name], "")
        return make_config(name, steps, marker)

    def steps(self, name: str) -> list[StepModel]:
        if name not in self.models:
            return []
        return steps_of(self._config(name, ""))

    def plan(self, name: str, override: str, files: dict[str, bytes]) -> list[VersionSpec]:
        self.read.append(name)
        config = self._config(name, override)
        folder = Path("/")
        return [
            VersionSpec(name, version, folder, config, fingerprint=self.files.get(version, ""))
            for version in self.versions
        ]

    def finalise_config(self, spec: VersionSpec, reported_properties: dict[str, Any]) -> ModelSpec:
        if None in reported_properties.get("steps", ()):
            raise InvalidArgument("a step's model is not available")
        return spec.config

    def discard(self, plan: VersionSpec) -> None:
        pass

    def has_environments(self) -> bool:
        return False


class Server(Processes):
    """Models of a repository, and a gateway, which acknowledges nothing while it is `silent`."""

    def __init__(self, **models: list[str]) -> None:
        super().__init__("--model-control-mode=explicit")
        self.silent = False
        self.sent: list[Any] = []
        self.registry = ModelRegistry()
        planner: Any = Repository(**models)
        self.repository: Repository = planner
        self.publisher = ModelPublisher()
        parts = (self.context, planner, self.registry)
        executor = LifecycleExecutor(*parts, self.publisher, [])
        self.models = ModelManager(executor)
        self.poller = RepositoryPoller(*parts, self.models)

    def broadcast(self, message: Any, *roles: str) -> None:
        self.sent += [message] if "gateway" in roles else []

    def announce(self, make: Callable[[int], Any], *roles: str, extra_peers: Any = ()) -> int:
        self.sent.append(make(0))
        return self.acknowledgements.begin(["gateway"] if self.silent else [])

    def acknowledge_all(self) -> None:
        """Acknowledge all publications so far for the gateway."""
        self.silent = False
        self.acknowledgements.remove_peer("gateway")

    async def load(self, name: str, steps: list[str] | None = None, marker: str = "") -> None:
        override = json.dumps([steps or [], marker]) if marker else ""
        await self.models.load_on_request(name, override, {})

    async def unload(self, name: str) -> None:
        await self.models.unload_on_request(name, False)

    def state(self, name: str, version: str = "1") -> tuple[str, str]:
        return self.registry.states()[name, version]

    def note(self, name: str) -> str:
        version = self.registry.model(name).serving["1"]
        return str(version.config.source["parameters"]["note"]["string_value"])

    def worker(self, name: str) -> Any:
        return [p for p in self.children if p.title.startswith(f"worker {name}.")][-1]


@contextlib.asynccontextmanager
async def serving(**models: list[str]) -> AsyncIterator[Server]:
    """Yield a server with these models and their steps, and end it; a test takes ten seconds."""
    async with asyncio.timeout(10):
        server = Server(**models)
        yield server
        await server.end()


async def run_ready_tasks() -> None:
    """Run all tasks that wait for no external event, including those in threads."""
    for _ in range(50):
        await asyncio.to_thread(len, "")
        await run_loop_turns()


async def test_an_unload_waits_for_the_load_of_an_ensemble_that_waits_for_another_step() -> None:
    """Both ensembles that use the model are unloaded before it."""
    async with serving(s=[], t=[], e=["s"], f=["s", "t"]) as server:
        await server.load("e")
        server.loads_hang = True
        load = asyncio.ensure_future(server.load("f"))
        await until_async(lambda: server.registry.model("t").incoming)
        unload = asyncio.ensure_future(server.unload("s"))
        await run_ready_tasks()
        assert not (load.done() or unload.done())
        server.finish_hanging_loads()
        await load
        await unload
        assert [server.state(name)[0] for name in "sef"] == ["UNAVAILABLE"] * 3
        assert server.state("t") == ("READY", "")


@pytest.mark.parametrize("is_slow", [True, False])
async def test_of_two_orders_the_later_one_wins(is_slow: bool) -> None:
    """Also when the earlier one has to wait for what it needs."""
    async with serving(s=[], t=[], e=["s"]) as server:
        await server.load("e")
        load_tasks: list[Any] = []
        if is_slow:
            server.loads_hang = True
            load_tasks.append(asyncio.ensure_future(server.load("t")))
            await until_async(lambda: any(c.title.startswith("worker t") for c in server.children))
        loads = [
            asyncio.ensure_future(server.load("e", ["t"], "first")),
            asyncio.ensure_future(server.load("e", ["s"], "second")),
        ]
        await run_ready_tasks()
        server.finish_hanging_loads()
        await asyncio.gather(*load_tasks, *loads)
        assert server.note("e") == "second"


async def test_an_override_survives_the_reload_of_a_step() -> None:
    """An ensemble is reloaded with its override and not with the configuration of its folder."""
    async with serving(s=[], e=["s"]) as server:
        await server.load("e", ["s"], "sent")
        await server.load("s", [], "another")
        assert server.note("e") == "sent"
        await server.unload("s")
        await server.load("s")
        assert server.note("e") == "sent"
        with pytest.raises(InvalidArgument):
            await server.load("e", ["none"], "broken")
        await server.load("s", [], "a third")
        assert server.note("e") == "sent"
        await server.load("e")
        await server.load("s")
        assert server.note("e") == ""


async def test_cyclic_overrides_are_refused() -> None:
    """The check uses the serving configurations, not those of the folders."""
    async with serving(s=[], a=["s"], b=["s"]) as server:
        await server.load("b", ["a"], "on a")
        with pytest.raises(InvalidArgument, match="a -> b -> a"):
            await server.load("a", ["b"], "on b")
        assert server.registry.all_ready()
        await server.unload("a")
        await until_async(lambda: server.state("b")[0] == "UNAVAILABLE")
        await server.load("a")
        assert server.state("b") == ("READY", "")


async def test_a_cycle_with_a_serving_ensemble_is_refused_during_a_load() -> None:
    """The load may fail, and then it serves on."""
    async with serving(s=[], t=[], a=["s"], b=["a"]) as server:
        await server.load("b")
        server.loads_hang = True
        load = asyncio.ensure_future(server.load("b", ["t"], "on t"))
        await until_async(lambda: server.registry.model("t").incoming)
        with pytest.raises(InvalidArgument, match="a -> b -> a"):
            await server.load("a", ["b"], "on b")
        server.finish_hanging_loads()
        await load


async def test_an_ensemble_reports_a_step_that_failed_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instances, "_MAX_FAILED_LOADS", 1)
    async with serving(s=[], e=["s"]) as server:
        await server.load("e")
        server.on_start = lambda child: child.kill(signal.SIGABRT)
        server.worker("s").kill()
        await run_loop_turns(1)
        assert server.state("e") == ("LOADING", "a process is being restarted")
        await until_async(lambda: server.state("s")[0] == "UNAVAILABLE")
        state, reason = server.state("e")
        assert (state, reason.partition(":")[0]) == ("UNAVAILABLE", "model 's' failed")
        server.on_start = lambda child: None
        await server.load("s")
        assert (server.state("s"), server.state("e")) == (("READY", ""), ("READY", ""))


async def test_unchanged_versions_are_not_published() -> None:
    """One of two instances exits and restarts; the model accepts requests all the time."""
    async with serving(s=[]) as server:
        two_instances = {"name": "s_0", "kind": "KIND_CPU", "count": 2}
        planner: Any = server.repository
        planner._config = lambda name, override: ModelSpec.of(
            {**CONFIG, "name": "s", "instance_group": [two_instances]}
        )
        await server.load("s")
        server.sent.clear()
        workers = [process for process in server.children if process.title.startswith("worker s.")]
        workers[0].kill()
        version = server.registry.model("s").serving["1"]
        await until_async(lambda: len(server.children) == 4)
        await until_async(lambda: set(version.instances.states()) == {"ready"})
        assert server.sent == []
        workers[1].kill()
        server.worker("s").kill()
        await run_loop_turns(1)
        await until_async(lambda: version.ready)
        assert server.sent == [m.ReadinessChanged("s", "1", ready) for ready in (False, True)]


async def test_a_gateway_that_starts_during_a_switch_receives_the_current_state() -> None:
    """The draining version still serves. The gateway also receives the changes that follow."""
    async with serving(s=[]) as server:
        await server.load("s")
        server.repository.versions = ["2"]
        server.silent = True
        load = asyncio.ensure_future(server.load("s"))
        await until_async(lambda: server.registry.model("s").is_offered)
        snapshot = list(server.publisher.snapshot())
        assert {type(update) for update in snapshot} == {m.ModelPublished}
        offered = [(update.version, update.latest) for update in snapshot]
        assert offered == [("1", False), ("2", True)]
        server.acknowledge_all()
        await load
        snapshot = list(server.publisher.snapshot())
        assert [type(update) for update in snapshot] == [m.ModelWithdrawn, m.ModelPublished]


async def test_a_load_that_failed_temporarily_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller repeats it. A load that the model itself refused waits for changed files."""
    monkeypatch.setattr("shmserve.supervisor.reload._FIRST_PAUSE_S", 0.0)
    async with serving(s=[]) as server:
        server.on_start = lambda child: child.kill()
        with pytest.raises(InvalidArgument, match="ended while loading"):
            await server.poller.update("s", True)
        server.on_start = lambda child: None
        await server.poller.update("s", True)
        assert server.state("s") == ("READY", "")
        started_before = len(server.children)
        await server.poller.update("s", True)
        assert len(server.children) == started_before
        server.on_start = lambda child: child.kill()
        with pytest.raises(InvalidArgument, match="ended while loading"):
            await server.load("s", [], "by a request")
        server.registry.model("s").serving.clear()
        server.on_start = lambda child: None
        await server.poller.update("s", True)
        assert server.state("s") == ("READY", "") and server.poller._retries == {}


async def test_a_long_lived_worker_that_cannot_load_again_backs_off() -> None:
    """The long life counts once, so that a short shortage does not end the model."""
    async with serving(s=[]) as server:
        await server.load("s")
        (instance,) = server.registry.model("s").serving["1"].instances._instances
        instance.ready_at -= 3600
        backoff = MagicMock(exits=1, **{"pause_s.return_value": 0.0})
        instance.backoff = backoff
        server.on_start = lambda child: child.kill(signal.SIGABRT)
        server.worker("s").kill()
        await until_async(lambda: server.state("s")[0] == "UNAVAILABLE")
        first_pause, *later_pauses = [call.args[0] for call in backoff.pause_s.call_args_list]
        assert first_pause >= 3600
        assert later_pauses == [0.0] * 4


def pids(server: Server, name: str) -> dict[str, list[int]]:
    serving = server.registry.model(name).serving
    return {version: live.instances.pids() for version, live in serving.items()}


async def test_a_reload_touches_only_versions_that_differ() -> None:
    """An unchanged version keeps its processes, and so its statistics and state."""
    async with serving(s=[]) as server:
        server.repository.versions = ["1", "2"]
        await server.load("s")
        pids_before, kept_version = pids(server, "s"), server.registry.model("s").serving["1"]
        server.repository.versions = ["1", "2", "3", "4"]
        server.repository.files = {"2": "touched"}
        server.sent.clear()
        await server.load("s")
        pids_after = pids(server, "s")
        assert list(pids_after) == ["1", "2", "3", "4"]
        assert pids_after["1"] == pids_before["1"] and pids_after["2"] != pids_before["2"]
        assert server.registry.model("s").serving["1"] is kept_version
        published = [u.version for u in server.sent if isinstance(u, m.ModelPublished)]
        assert sorted(published) == ["2", "3", "4"]
        server.repository.versions = ["1", "3"]
        await server.load("s")
        assert pids(server, "s") == {version: pids_after[version] for version in "13"}
        await until_async(lambda: server.state("s", "2") == ("UNAVAILABLE", "unloaded"))


@pytest.mark.parametrize("is_rewritten", [True, False])
async def test_a_reload_keeps_unchanged_versions(is_rewritten: bool) -> None:
    """Files with the same content change nothing; an explicit load restarts everything."""
    async with serving(s=[]) as server:
        await server.load("s")
        pids_before = pids(server, "s")
        if is_rewritten:
            server.repository.files = {"another": "version"}
        await server.load("s")
        assert (pids(server, "s") == pids_before) is is_rewritten


async def test_a_failing_version_keeps_the_other_versions() -> None:
    """All of a load or none."""
    async with serving(s=[]) as server:
        await server.load("s")
        pids_before = pids(server, "s")
        server.repository.versions = ["1", "2"]
        server.on_start = lambda child: child.kill()
        with pytest.raises(InvalidArgument, match="version 2 is at UNAVAILABLE state"):
            await server.load("s")
        assert pids(server, "s") == pids_before and server.state("s") == ("READY", "")


@pytest.mark.parametrize("more_names", [[], ["f"], ["s"]])
async def test_an_abandoned_load_cancels_its_steps_loads(
    more_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of the step continues if another ensemble or a request waits for it."""
    monkeypatch.setattr(instance_module, "FIRST_REPORT_S", 0.05)
    async with serving(s=[], e=["s"], f=["s"]) as server:
        server.loads_hang = True
        load = asyncio.ensure_future(server.load("e"))
        await until_async(lambda: server.registry.model("s").incoming)
        other_loads = [asyncio.ensure_future(server.load(name)) for name in more_names]
        await run_ready_tasks()
        await server.unload("e")
        with pytest.raises(InvalidArgument, match="failed to load 'e', no version is available"):
            await load
        await run_ready_tasks()
        assert any(child.alive for child in server.children) is bool(more_names)
        server.finish_hanging_loads()
        await asyncio.gather(*other_loads)
        assert ("s", "1") not in server.registry.states() or server.registry.all_ready()
        assert bool(server.registry.model("s").serving) is bool(more_names)


async def test_an_ensemble_without_its_step_is_unavailable() -> None:
    """A serving ensemble whose step was removed is not ready, and reports the reason."""
    async with serving(s=[], e=["s"]) as server:
        await server.load("e")
        ensemble = server.registry.model("e").serving["1"]
        server.registry.model("s").serving.clear()
        with pytest.raises(Unavailable, match="model 's' is not available"):
            await ensemble.until_ready()


def test_a_repository_that_is_polled_every_0_seconds_is_not_polled() -> None:
    context: Any = SimpleNamespace(config=SimpleNamespace(repository_poll_s=0))
    unused: Any = None
    asyncio.run(asyncio.wait_for(RepositoryPoller(context, unused, unused, unused).run(), 1))
