"""What was read: counts for the run's log."""

from dataclasses import dataclass, fields

from fornax.tune.data.encoded import Encoded

__all__ = ["Summary"]


@dataclass(kw_only=True)
class Summary:
    """Counts over a data set; what the window did to it is among them."""

    name: str
    """The files."""
    records: int = 0
    """Lines read."""
    examples: int = 0
    """What they became, after dropping."""
    tokens: int = 0
    """Tokens of all examples; both of a pair."""
    trained_tokens: int = 0
    """Tokens that the loss counts."""
    longest: int = 0
    """Tokens of the longest sequence kept."""
    dropped: int = 0
    """Examples left out because they are longer than the window."""
    truncated: int = 0
    """Examples cut to the window."""
    untrainable: int = 0
    """Examples left out because the cut left nothing to learn."""
    split: int = 0
    """Sequences added because a template rewrites earlier turns."""

    def add(self, *sequences: Encoded) -> None:
        """Count an example of these sequences."""
        self.examples += 1
        for sequence in sequences:
            self.tokens += sequence.length
            self.trained_tokens += sequence.trained
            self.longest = max(self.longest, sequence.length)

    def numbers(self) -> dict[str, int]:
        """All counts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}

    def text(self) -> str:
        """One line to print."""
        share = f" ({self.trained_tokens / self.tokens:.0%} trained)" if self.trained_tokens else ""
        said = (
            f"{self.name}: {self.examples:,} examples, {self.tokens:,} tokens{share}, "
            f"longest {self.longest:,}"
        )
        counts = {
            "dropped as too long": self.dropped,
            "truncated": self.truncated,
            "dropped with nothing left to learn": self.untrainable,
            "split off where the template rewrites history": self.split,
        }
        return "; ".join([said, *(f"{n:,} {what}" for what, n in counts.items() if n)])
