"""Page pool: no page is handed out twice, the scratch page never."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dspark_runtime.kv_cache import PagePool
from verify_kernels.batch import SCRATCH_PAGE


@given(st.integers(2, 40), st.lists(st.integers(0, 6), max_size=60))
def test_pages_have_one_owner(num_pages: int, wishes: list[int]) -> None:
    pool = PagePool(num_pages, 16)
    owned: list[list[int]] = []
    for wish in wishes:
        if wish and wish <= pool.num_free:
            owned.append(pool.take(wish))
        elif owned:
            pool.give(owned.pop(wish % len(owned)))
        held = [page for pages in owned for page in pages]
        assert len(held) == len(set(held)) == pool.capacity - pool.num_free
        assert SCRATCH_PAGE not in held and all(0 < page < num_pages for page in held)
    for pages in owned:
        pool.give(pages)
    assert pool.num_free == pool.capacity


def test_pages_for_rounds_up() -> None:
    pool = PagePool(8, 16)
    assert [pool.pages_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]
