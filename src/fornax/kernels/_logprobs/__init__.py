"""Log-probabilities of given tokens straight from hidden states, never with all logits at once."""

from fornax.kernels._logprobs.call import TokenLogprobs
from fornax.kernels._logprobs.operation import linear_logprobs, logits_logprobs, logprobs_operation

__all__ = ["TokenLogprobs", "linear_logprobs", "logits_logprobs", "logprobs_operation"]
