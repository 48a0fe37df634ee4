"""The pages of one group: who holds them, which hold a known prefix, which is given out next."""

from collections import OrderedDict

__all__ = ["PagePool"]


class PagePool:
    """Pages 1 to num_pages - 1 of one cache array; page 0 takes the writes of padding tokens.

    A page is held (by one or more sequences), idle (held by none, but its content is a known
    prefix that may be asked for again) or blank. Blank pages are given out first, then idle ones,
    the least recently released first.
    """

    __slots__ = ("_blank", "_idle", "by_digest", "digests", "holders", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.holders = [0] * num_pages
        self.digests: list[bytes | None] = [None] * num_pages
        self.by_digest: dict[bytes, int] = {}
        self._blank = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that are held."""
        return self.num_pages - 1 - self.available

    def take(self) -> int:
        """Give out a page with one holder; its content is no longer known."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            digest = self.digests[page]
            assert digest is not None, "an idle page has a digest"
            del self.by_digest[digest]
            self.digests[page] = None
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page that is held or idle."""
        if self.holders[page] == 0:
            del self._idle[page]
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """Take a holder away."""
        self.holders[page] -= 1
        if self.holders[page] == 0:
            if self.digests[page] is None:
                self._blank.append(page)
            else:
                self._idle[page] = None

    def register(self, page: int, digest: bytes) -> None:
        """Say that a held page is full and what it holds; the first page of a digest is found."""
        if digest not in self.by_digest:
            self.by_digest[digest] = page
            self.digests[page] = digest

    def forget(self) -> None:
        """Forget what every page holds; holders keep theirs."""
        self.by_digest.clear()
        self.digests = [None] * self.num_pages
        self._blank.extend(self._idle)
        self._idle.clear()
