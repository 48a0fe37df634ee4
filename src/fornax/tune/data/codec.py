"""Text and conversations to token ids, just as the engine encodes them when it serves the model."""

from collections.abc import Sequence

import numpy as np

from fornax.config.errors import DataError
from fornax.data import Tokenizer
from fornax.llm.text import ChatTemplate
from fornax.tune.data.chat import ChatEncoder
from fornax.tune.data.encoded import Encoded, encoded
from fornax.tune.data.records import Chat, Messages, Tools, Variables
from fornax.tune.data.tokenizer import TextEncoder

__all__ = ["Codec"]


class Codec:
    """Encodes with one tokenizer and one chat template.

    Args:
      tokenizer: the model's.
      template: the model's chat template; None: conversations are refused.
      eos_ids: ids that end an answer when the model is served (generation_config.json); the
        tokenizer's own is one of them.
      variables: further variables of the template, such as `{"enable_thinking": False}`; those of a
        record go before them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        eos_ids: Sequence[int] = (),
        variables: Variables | None = None,
    ):
        self.tokenizer = tokenizer
        self.template = template
        own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self.eos_ids = tuple(dict.fromkeys((*own, *eos_ids)))
        self.variables = dict(variables or {})
        self.encoder = TextEncoder(tokenizer)
        self._chats = ChatEncoder(
            self.encoder, template, eos_ids=self.eos_ids, variables=self.variables
        )

    @property
    def bos_id(self) -> int | None:
        """The token that begins every text here, if any does."""
        return self.encoder.bos_id

    def prompt(
        self,
        prompt: str | Messages,
        tools: Tools = None,
        variables: Variables | None = None,
    ) -> np.ndarray:
        """Ids that the model continues, int32 `[n]`.

        Messages end with the template's generation prompt and get no further special token; text
        begins with the tokenizer's own beginning token, once.

        Raises:
          DataError: for messages that the template refuses.
        """
        if isinstance(prompt, str):
            return self.encoder.encode(prompt)
        return self._chats.prompt(prompt, tools, variables)

    def chat(self, chat: Chat) -> list[Encoded]:
        """A conversation, every assistant turn learned; see `fornax.tune.data.chat`.

        Usually one sequence. Where the template writes earlier turns differently once later ones
        follow (thoughts left out, say), one for each such turn, in the context that it has when the
        model is served.

        Raises:
          DataError: for what the template refuses, or writes so that no mask can be right.
        """
        return self._chats.chat(chat)

    def completion(
        self,
        prompt: str | Messages,
        completion: str | Messages,
        tools: Tools = None,
        variables: Variables | None = None,
    ) -> Encoded:
        """A prompt and the completion after it; the completion is learned, its end included.

        Text is encoded apart from its prompt, so that no token lies across the boundary: when the
        model is served the prompt's tokens come before it writes the first of its own.

        Raises:
          DataError: for what the template refuses, or a tokenizer without an end token.
        """
        if not isinstance(prompt, str) and not isinstance(completion, str):
            return self._chats.completion(prompt, completion, tools, variables)
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise DataError("one of prompt and completion is text; write both as text or messages")
        asked = self.encoder.encode(prompt)
        answered = self._ended(self.encoder.encode_continuation(completion))
        mask = np.arange(len(asked) + len(answered)) >= len(asked)
        return encoded(np.concatenate([asked, answered]), mask)

    def text(self, text: str) -> Encoded:
        """A text, all of it learned, with the end token."""
        tokens = self._ended(self.encoder.encode(text))
        return encoded(tokens, np.ones(len(tokens), bool))

    def _ended(self, tokens: np.ndarray) -> np.ndarray:
        """With the end token behind, unless it is there."""
        if not self.eos_ids:
            raise DataError(
                "the tokenizer has no end token, so the model could not learn to stop; name its "
                "eos_token in tokenizer_config.json"
            )
        if len(tokens) and int(tokens[-1]) in self.eos_ids:
            return tokens
        return np.append(tokens, np.int32(self.eos_ids[0]))
