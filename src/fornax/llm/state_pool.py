"""The slots of layers' states: those of running sequences, and those kept for beginnings."""

from collections import OrderedDict

__all__ = ["StatePool"]


class StatePool:
    """Slots of states, which are copied between them, all layers' at once.

    The first ones belong to rows: `versions` of a row, which a step writes. The rest keep states of
    beginnings: such a slot is blank, held (by a sequence, until it is known what its state is of)
    or known by the digest of the last page that its state is of. Blank ones are given out first,
    then known ones, the least recently used first; held ones never.
    """

    __slots__ = ("_blank", "_known", "num_kept", "versions")

    def __init__(self, rows: int, versions: int, num_kept: int) -> None:
        """Make the pool for `rows` sequences at once, with `num_kept` slots beside theirs."""
        self.versions = versions
        self.num_kept = num_kept
        first = rows * versions
        self._blank = list(range(first + num_kept - 1, first - 1, -1))
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        """Whether the state after a page is kept."""
        return digest in self._known

    @property
    def num_known(self) -> int:
        """Slots whose state is known."""
        return len(self._known)

    @property
    def num_blank(self) -> int:
        """Slots that keep nothing."""
        return len(self._blank)

    def slot_of(self, row: int, version: int = 0) -> int:
        """The slot of one of a row's states."""
        return row * self.versions + version

    def use(self, digest: bytes) -> int:
        """The slot of a known state, which counts as used now."""
        self._known.move_to_end(digest)
        return self._known[digest]

    def take(self) -> int | None:
        """Give out a slot to hold; None if all are held."""
        if self._blank:
            return self._blank.pop()
        return self._known.popitem(last=False)[1] if self._known else None

    def name(self, slot: int, digest: bytes) -> None:
        """Say which page the state of a held slot is after; one slot for each is enough."""
        if digest in self._known:
            self._known.move_to_end(digest)
            self._blank.append(slot)
        else:
            self._known[digest] = slot

    def give_back(self, slot: int) -> None:
        """Hold a slot no more; nothing is known of its state."""
        self._blank.append(slot)

    def drop(self, digest: bytes) -> None:
        """Forget the state after a page, if it is known: the page is gone, or the slot is wanted
        for a later state."""
        slot = self._known.pop(digest, None)
        if slot is not None:
            self._blank.append(slot)

    def forget(self) -> None:
        """Forget every known state; held slots stay with their sequences."""
        self._blank.extend(self._known.values())
        self._known.clear()
