"""Two models that are compared token by token must mean the same by each."""

from fornax.config.errors import ConfigError
from fornax.data import Tokenizer

__all__ = ["check_same_tokens", "shared_vocabulary"]


def check_same_tokens(
    other: Tokenizer, own: Tokenizer, *, names: tuple[str, str], others: tuple[str, str]
) -> None:
    """Refuse a second model whose tokens mean something else.

    Args:
      other: the second model's tokenizer.
      own: the trained model's.
      names: what the second model is called in the config, and its path.
      others: the same of the trained one.

    Raises:
      ConfigError: naming tokens that differ.
    """
    theirs, ours = (t.backend.get_vocab(with_added_tokens=True) for t in (other, own))
    if theirs == ours:
        return
    differing = sorted(t for t in {*theirs, *ours} if theirs.get(t) != ours.get(t))
    shown = "; ".join(
        f"{t!r} is {_number(theirs, t)} there and {_number(ours, t)} here" for t in differing[:3]
    )
    raise ConfigError(
        f"the vocabularies of {names[0]}={names[1]} ({len(theirs)} tokens) and "
        f"{others[0]}={others[1]} ({len(ours)} tokens) differ in {len(differing)} tokens: {shown}. "
        "Both models must see the same tokens; take two that share a tokenizer"
    )


def _number(vocabulary: dict[str, int], token: str) -> str:
    return str(vocabulary[token]) if token in vocabulary else "missing"


def shared_vocabulary(teacher: int, student: int, tokens: int) -> int:
    """How many outputs to compare: models of one tokenizer pad their vocabularies differently.

    Raises:
      ConfigError: when a model has fewer outputs than its tokenizer has tokens.
    """
    shared = min(teacher, student)
    if shared < tokens:
        raise ConfigError(
            f"the tokenizer has {tokens} tokens, and a model only {shared} outputs; check that "
            "teacher and student are of this tokenizer"
        )
    return shared
