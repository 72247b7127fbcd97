"""Pages of the KV cache: who owns which. The tensors themselves are `verify_kernels.batch.KVCache`."""

from __future__ import annotations

from verify_kernels.batch import SCRATCH_PAGE


class PagePool:
    """Free list over pages 1 .. num_pages - 1; page 0 is the scratch page and is never handed out."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))

    @property
    def capacity(self) -> int:
        """Pages that can be handed out in all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """count pages; the caller has checked num_free."""
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, pages: list[int]) -> None:
        self._free.extend(pages)
