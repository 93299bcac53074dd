"""Reloads that change instances only: which loads are such, and how versions that serve are updated
in place of being replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shmserve.errors import Internal, ShmserveError
from shmserve.supervisor.models.registry import ModelEntry
from shmserve.supervisor.models.rollout import Rollout, load_failed
from shmserve.supervisor.models.version.instance_update import InstanceUpdate
from shmserve.supervisor.models.version.spec import VersionSpec

logger = logging.getLogger(__name__)

Updates = dict[str, InstanceUpdate]


def updates_for(model: ModelEntry, specs: Sequence[VersionSpec]) -> Updates | None:
    """What each version that serves is to become, or None where another deployment is needed: other
    versions, one that is broken, or another difference than in instances; or none at all."""
    if {spec.version for spec in specs} != model.serving.keys():
        return None
    found: Updates = {}
    for spec in specs:
        update = model.serving[spec.version].update_to(spec)
        if update is None:
            return None
        found[spec.version] = update
    return found


async def update(model: ModelEntry, updates: Updates, rollout: Rollout) -> None:
    """Update every version, or none when one fails; raises InvalidArgument then.

    Returns once every gateway knows.
    """
    model.updates = list(updates.values())
    try:
        await _add_all(model, updates)
    except BaseException:
        for each in model.updates:
            each.revert()
        raise
    finally:
        model.updates = []
    for version, each in updates.items():
        model.serving[version].commit(each)
        logger.info("updated the instances of '%s' version %s", model.name, version)
    await rollout.published_again(model)


async def _add_all(model: ModelEntry, updates: Updates) -> None:
    added = await asyncio.gather(*(each.add() for each in updates.values()), return_exceptions=True)
    failures: dict[str, str] = {}
    for version, result in zip(updates, added, strict=True):
        if isinstance(result, BaseException):
            if not isinstance(result, ShmserveError):
                logger.error("loading failed", exc_info=result)
                result = Internal("internal error")
            failures[version] = f"{result.title}: {result.message}"
            logger.error(
                "failed to load '%s' version %s: %s", model.name, version, failures[version]
            )
    if failures:
        raise load_failed(model, failures)
