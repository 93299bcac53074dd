"""A registry of regions with one gateway whose messages are recorded, and access policies."""

from dataclasses import replace
from typing import Any

from shmserve.common.peers import NO_GROUP, ShmPolicy
from shmserve.supervisor.host.service_manager import ServiceManager
from shmserve.supervisor.regions.opener import HandleCheck, RegionOpener
from shmserve.supervisor.regions.region import KeptRegions
from shmserve.supervisor.regions.registry import RegionRegistry
from tests.rigs.process_rig import RecordedProcesses


def policy(**limits: Any) -> ShmPolicy:
    """Return a policy with these limits and large default limits."""
    large_policy = ShmPolicy(None, NO_GROUP, 100, 100, 1 << 30, 1 << 30, 1 << 20)
    return replace(large_policy, **limits)


class RegionRig(RecordedProcesses):
    """A registry, and the gateway and workers that it reaches."""

    def __init__(self, limits: ShmPolicy | None = None, handles: HandleCheck | None = None) -> None:
        super().__init__()
        self.kept_regions = KeptRegions(ServiceManager(None))
        self.registry = RegionRegistry(
            self, RegionOpener(limits or policy(), handles), lambda event: None, self.kept_regions
        )


def unchecked_handles(devices: int) -> HandleCheck:
    """Return a check of CUDA handles on a host where no worker uses a device."""
    no_call: Any = lambda *_: []  # noqa: E731
    return HandleCheck(devices, no_call, no_call)
