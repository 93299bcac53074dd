"""The trust policy of regions: owners, limits, and the charged user."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.common.peers import EVERYONE, NO_GROUP, REMOTE, Ownership, Peer, ShmPolicy, ownership
from shmserve.errors import InvalidArgument, PermissionDenied
from shmserve.supervisor.regions.opener import RegionQuota
from tests.support.regions import SharedObject

OWN_UID = os.geteuid()
ALICE = Peer(1001, (100, 200))
GROUP = 200


def policy(**limits: int) -> ShmPolicy:
    max_limits = dict.fromkeys(
        ("max_regions", "max_regions_per_uid", "max_byte_size", "max_byte_size_per_uid"), 1 << 40
    )
    return ShmPolicy(
        allow=None,
        group=NO_GROUP,
        **{**max_limits, "sparse_byte_size": 1 << 40, **limits},
    )


@pytest.mark.parametrize(
    ("peer", "uid", "gid", "mode", "group", "owner"),
    [
        (Peer(OWN_UID), OWN_UID, 0, 0o600, NO_GROUP, Ownership(OWN_UID, NO_GROUP, False)),
        (Peer(OWN_UID), OWN_UID, 0, 0o660, NO_GROUP, Ownership(OWN_UID, NO_GROUP, True)),
        (Peer(OWN_UID), OWN_UID, 0, 0o666, NO_GROUP, Ownership(OWN_UID, NO_GROUP, True)),
        (ALICE, 1001, 0, 0o600, NO_GROUP, Ownership(1001, NO_GROUP, True)),
        (ALICE, OWN_UID, 0, 0o666, NO_GROUP, None),
        (ALICE, 1002, 0, 0o666, NO_GROUP, None),
        (Peer(OWN_UID), 1001, 0, 0o666, NO_GROUP, None),
        (ALICE, 1002, GROUP, 0o660, NO_GROUP, None),
        (ALICE, 1002, GROUP, 0o660, GROUP, Ownership(1001, GROUP, True)),
        (ALICE, 1001, GROUP, 0o660, GROUP, Ownership(1001, GROUP, True)),
        (ALICE, 1002, GROUP, 0o640, GROUP, None),
        (ALICE, 1002, 100, 0o660, GROUP, None),
        (Peer(1003), 1002, GROUP, 0o660, GROUP, None),
        (REMOTE, OWN_UID, 0, 0o600, NO_GROUP, Ownership(-1, NO_GROUP, True)),
        (REMOTE, 1001, 0, 0o666, NO_GROUP, None),
        (REMOTE, 1001, GROUP, 0o660, GROUP, Ownership(-1, GROUP, True)),
    ],
)
def test_the_owner_of_an_object(
    peer: Peer, uid: int, gid: int, mode: int, group: int, owner: Ownership | None
) -> None:
    """An object must belong to the client or to the configured group."""
    if owner is None:
        with pytest.raises(PermissionDenied) as caught:
            ownership(peer, "/k", uid, gid, mode, group)
        assert str(uid) in caught.value.message or peer == REMOTE
    else:
        assert ownership(peer, "/k", uid, gid, mode, group) == owner


def test_which_clients_may_use_a_region() -> None:
    own_region = Ownership(1001, NO_GROUP, True)
    assert own_region.admits(ALICE) and not own_region.admits(Peer(1002, (GROUP,)))
    assert not own_region.admits(REMOTE)
    shared_region = Ownership(1001, GROUP, True)
    assert shared_region.admits(Peer(1002, (GROUP,)))
    assert not shared_region.admits(Peer(1002, (100,)))
    assert not Ownership(-1, NO_GROUP, True).admits(Peer(EVERYONE))


def test_regions_are_counted_by_user_and_in_total() -> None:
    """Exceeding the limit is a clear error, and closed regions no longer count."""
    quota = RegionQuota(policy(max_regions=3, max_regions_per_uid=2))
    for inode in (1, 2):
        quota.count(1001, 10, (0, inode))
    with pytest.raises(InvalidArgument, match=r"at most 2 .*--shm-max-regions-per-uid"):
        quota.count(1001, 10, (0, 3))
    quota.count(1002, 10, (0, 3))
    with pytest.raises(InvalidArgument, match=r"at most 3 .*--shm-max-regions\)"):
        quota.count(1002, 10, (0, 4))
    quota.release(1001, 10, (0, 1))
    quota.count(1002, 10, (0, 4))


def test_bytes_are_counted_by_user_and_in_total() -> None:
    """The number of bytes is limited, too."""
    quota = RegionQuota(policy(max_byte_size=100, max_byte_size_per_uid=60))
    quota.count(1001, 60, (0, 1))
    with pytest.raises(InvalidArgument, match=r"60 of the 60 bytes .*--shm-max-byte-size-per-uid"):
        quota.count(1001, 1, (0, 1))
    with pytest.raises(InvalidArgument, match="60 of the 100 bytes"):
        quota.count(1002, 41, (0, 2))
    quota.count(1002, 40, (0, 2))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 2**63 - 1), st.integers(0, 5)), max_size=20
    )
)
def test_a_quota_stays_in_its_limits_and_ends_empty(regions: list[tuple[int, int, int]]) -> None:
    largest = 2**63 - 1
    quota = RegionQuota(policy(max_regions=6, max_regions_per_uid=3, max_byte_size=largest))
    charges = []
    for uid, size, inode in regions:
        try:
            quota.count(uid, size, (0, inode))
        except InvalidArgument:
            continue
        charges.append((uid, size, (0, inode)))
        assert len(charges) <= 6
        assert sum(size for _, size, _ in charges) <= largest
        assert sum(other_uid == uid for other_uid, _, _ in charges) <= 3
    for entry in charges:
        quota.release(*entry)
    assert not quota._regions_by_uid and not quota._bytes_by_uid and not quota._regions_by_file


def test_the_quota_is_charged_until_the_object_is_removed() -> None:
    """Unregistering frees no pages and therefore no quota; removing the object does."""
    quota = RegionQuota(policy(sparse_byte_size=100))
    with SharedObject(4096) as shared_object:
        status = os.fstat(shared_object.fd)
        file = (status.st_dev, status.st_ino)
        quota.count(1001, 80, file)
        quota.charge(shared_object.key, file, 80)
        quota.refund(file, 20)
        with pytest.raises(InvalidArgument, match=r"60 of the 100 bytes .*posix_fallocate"):
            quota.charge("/other", (0, 1), 41)
        quota.charge("/other", (0, 1), 40)
        quota.release(1001, 80, file)
        with pytest.raises(InvalidArgument):
            # The charge for /other was released, that for /more would exceed the quota.
            quota.charge("/more", (0, 2), 100)
        quota.charge("/more", (0, 2), 40)
    quota.charge("/last", (0, 3), 100)


def test_an_unlinked_object_that_is_registered_is_not_gone() -> None:
    """The registration keeps the memory of the object."""
    quota = RegionQuota(policy(sparse_byte_size=100))
    quota.count(1001, 80, (0, 7))
    quota.charge("/not-there", (0, 7), 80)
    with pytest.raises(InvalidArgument):
        quota.charge("/other", (0, 8), 30)
    quota.release(1001, 80, (0, 7))
    quota.charge("/other", (0, 8), 30)
