"""Two small environments, to learn from and to test with: a guessing game and a calculator."""

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence

from fornax.tune.rollout.types import Message, Record, ToolSchemas, Turn

__all__ = ["GuessNumber", "calculate"]


class GuessNumber:
    """The model guesses a number and learns whether it is higher or lower.

    The reward `solved` is 1 for the right number, less a little for each guess before it;
    `readable` counts turns with a number in them, at a tenth of their share.
    """

    tools: ToolSchemas = ()

    def __init__(self, highest: int = 100, guesses: int = 7) -> None:
        """Numbers go from 1 to `highest`; after `guesses` of them it is over."""
        self._highest = highest
        self._guesses = guesses
        self._number = 0
        self._made = 0

    def reset(self, record: Record, seed: int) -> Sequence[Message]:
        """The number is the record's `number`, or drawn with the seed."""
        self._number = int(record.get("number") or random.Random(seed).randint(1, self._highest))
        self._made = 0
        text = f"Guess my number from 1 to {self._highest}. Say one number at a time.\n"
        return [{"role": "user", "content": text}]

    def step(self, message: Message) -> Turn:
        """Compare the last number that the model named."""
        self._made += 1
        named = re.findall(r"\d{1,9}", message["content"])
        if not named:
            return self._go_on("Say a number.\n", {})
        readable = {"readable": 0.1 / self._guesses}
        guess = int(named[-1])
        if guess == self._number:
            solved = 1 - 0.5 * (self._made - 1) / self._guesses
            return Turn(done=True, rewards={**readable, "solved": solved})
        return self._go_on("higher\n" if guess < self._number else "lower\n", readable)

    def _go_on(self, text: str, rewards: Mapping[str, float]) -> Turn:
        if self._made >= self._guesses:
            return Turn(done=True, rewards=rewards)
        return Turn(messages=[{"role": "user", "content": text}], rewards=rewards)


_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / // % and brackets."""
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise ValueError("only numbers, + - * / // % and brackets are known")
