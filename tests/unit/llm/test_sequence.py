"""The counts of a sequence."""

from fornax.llm.sequence import Sequence, Status


def test_remaining_counts_pending_tokens():
    sequence = Sequence(1, "r", [5, 6, 7], max_len=10)
    assert (sequence.length, sequence.remaining, sequence.output) == (3, 3, [])
    sequence.num_computed = 3
    sequence.num_pending = 1
    assert (sequence.length, sequence.remaining) == (4, 1)
    sequence.tokens.append(8)
    sequence.num_pending = 0
    assert (sequence.length, sequence.remaining, sequence.output) == (4, 1, [8])
    assert sequence.prompt == [5, 6, 7]


def test_new_sequence_waits_without_a_row():
    sequence = Sequence(1, "r", [5], max_len=2)
    assert sequence.status is Status.WAITING
    assert sequence.row is None


def test_equal_sequences_are_different_ones():
    assert Sequence(1, "r", [5], max_len=2) != Sequence(1, "r", [5], max_len=2)
