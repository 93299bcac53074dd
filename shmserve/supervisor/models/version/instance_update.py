"""An in-place update: a version that serves gets the instances of another `instance_group`, with no
other scheduler. No request notices, and its statistics go on.

add      the model loads in the instances that are new, which serve at once; or none is added
commit   those that are not asked for any more finish what they have, and end
"""

from __future__ import annotations

from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.version.instance_processes import Instances
from shmserve.supervisor.models.version.instances import InstanceChange
from shmserve.supervisor.models.version.spec import VersionSpec


def differs_in_instances_only(old: VersionSpec, new: VersionSpec) -> bool:
    """Whether nothing differs but the instances: neither what else is configured, nor a file."""
    same_files = (old.model_dir, old.files) == (new.model_dir, new.files)
    same_rest = old.config.immutable_config == new.config.immutable_config
    return same_files and same_rest and not new.steps


class InstanceUpdate:
    """A change from the instances that a version has to those of `config`, the final configuration
    of `spec`."""

    def __init__(self, instances: Instances, spec: VersionSpec, config: ModelSpec) -> None:
        self.spec = spec
        self._instances = instances
        self._config = config
        self._change: InstanceChange | None = None

    async def add(self) -> None:
        """Add what is new. Raises ShmserveError when one fails to load; none is added then."""
        self._change = self._instances.change_to(self._config)
        await self._instances.add(self._change, self._config)

    def commit(self) -> None:
        """Have what is not asked for any more retire."""
        assert self._change is not None
        self._instances.settle(self._change, self._config)

    def revert(self) -> None:
        """Have what was added retire, if anything was."""
        if self._change is not None:
            self._instances.retire(self._change.added)

    def cancel(self) -> None:
        """Have `add` fail, if it is still loading: nobody waits for what is added."""
        if self._change is not None:
            self._instances.kill_loading(self._change.added)
