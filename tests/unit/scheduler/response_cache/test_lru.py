"""The bound and the order of the response cache's entries, beside a plain model of them."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.scheduler.response_cache import LruCache

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 6), st.integers(0, 60)),
        st.tuples(st.just("find"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("resize"), st.integers(0, 100), st.just(0)),
    )
)


@given(STEPS)
def test_it_keeps_what_was_used_last_within_its_bound(steps: list[tuple[str, int, int]]) -> None:
    """Rule 3.8.5: bounded by bytes, the least recently used evicted, nothing larger than all."""
    cache: LruCache[int] = LruCache(50)
    bound = 50
    kept: dict[bytes, int] = {}  # by recency
    for what, number, size in steps:
        key = b"%d" % number
        if what == "insert":
            assert cache.insert(key, size, size) == (size <= bound)
            if size <= bound:
                kept.pop(key, None)
                kept[key] = size
        elif what == "find":
            assert cache.find(key) == kept.get(key)
            if key in kept:
                kept[key] = kept.pop(key)
        else:
            bound = number
            cache.resize(bound)
        while sum(kept.values()) > bound:
            del kept[next(iter(kept))]
        assert (cache.used, len(cache)) == (sum(kept.values()), len(kept))
        assert cache.used <= bound
