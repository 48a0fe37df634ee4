"""A tiny model in transformers and in Fornax, to compare losses and gradients with TRL's.

Legend: B rows, T tokens of a row.
"""

import copy
import functools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import accelerate
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from tests.parity.conftest import make_oracle

from fornax.models import load_pretrained, token_logprobs

__all__ = ["assert_same", "bare", "length_mask", "our_logps", "ours", "pull", "rows", "theirs"]

VOCABULARY, ROWS, PROMPT, LENGTH = 97, 6, 4, 12
"""All cases have one shape, so that one program serves them all."""


@functools.cache
def theirs(seed: int = 0) -> Any:
    """A small Qwen2; another seed, other weights."""
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = make_oracle(config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * seed * torch.randn_like(parameter))
    return model


def _converted(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_pretrained(folder)


@functools.cache
def _places() -> list[tuple[Any, np.ndarray]]:
    """Of each of our weights, which of their numbers, in the order of their parameters, it is."""
    numbered, start = copy.deepcopy(theirs()), 0
    with torch.no_grad():
        for parameter in numbered.parameters():
            index = torch.arange(start, start + parameter.numel()).reshape(parameter.shape)
            parameter.copy_(index)
            start += parameter.numel()
    assert start < 2**24, "float32 cannot number so many"
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.split(_converted(numbered))[1]))
    return [(path, np.asarray(leaf).astype(np.int64)) for path, leaf in leaves]


@functools.cache
def ours(seed: int = 0) -> tuple[Any, Any]:
    """The same weights as Fornax's decoder: (graph, state)."""
    return nnx.split(_converted(theirs(seed)))


def rows(seed: int, *, left: bool = False) -> dict[str, np.ndarray]:
    """Prompts and completions of several lengths; prompts padded on the left if asked to."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCABULARY, (ROWS, LENGTH))
    real = np.ones((ROWS, LENGTH), np.int64)
    for row in range(ROWS):
        real[row, LENGTH - row % 4 :] = 0
        if left:
            real[row, : row % 3] = 0
    completion = real * (np.arange(LENGTH) >= PROMPT)
    return {"input_ids": np.where(real, tokens, 0), "real": real, "completion": completion}


def length_mask(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which targets [B, T - 1] are tokens of a completion, float32."""
    return batch["completion"][:, 1:].astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _logps(graph: Any, state: Any, tokens: Any, real: Any, temperature: Any) -> jax.Array:
    decoder = nnx.merge(graph, state)
    found = token_logprobs(
        decoder,
        tokens[:, :-1],
        tokens[:, 1:],
        segment_ids_BT=real[:, :-1],
        temperature=temperature,
    )
    return found.logprobs


def our_logps(
    batch: Mapping[str, np.ndarray], *, seed: int = 0, temperature: float = 1.0
) -> jax.Array:
    """Log-probabilities [B, T - 1] of every token but the first."""
    tokens, real = (jnp.asarray(batch[name], jnp.int32) for name in ("input_ids", "real"))
    return _logps(*ours(seed), tokens, real, jnp.float32(temperature))


@functools.partial(jax.jit, static_argnums=0)
def _pull(graph: Any, state: Any, tokens: Any, real: Any, temperature: Any, slope: Any) -> Any:
    return jax.vjp(lambda s: _logps(graph, s, tokens, real, temperature), state)[1](slope)[0]


def pull(batch: Mapping[str, np.ndarray], slope: jax.Array, *, temperature: float = 1.0) -> Any:
    """Gradients of all weights, given a loss's gradient with respect to `our_logps`."""
    tokens, real = (jnp.asarray(batch[name], jnp.int32) for name in ("input_ids", "real"))
    return _pull(*ours(), tokens, real, jnp.float32(temperature), slope)


def assert_same(
    loss: Callable[[jax.Array], jax.Array],
    batch: Mapping[str, np.ndarray],
    their_loss: torch.Tensor,
    model: Any,
    *,
    temperature: float = 1.0,
) -> None:
    """Our loss of log-probabilities [B, T - 1] and its gradients at all weights equal theirs."""
    value, slope = jax.jit(jax.value_and_grad(loss))(our_logps(batch, temperature=temperature))
    np.testing.assert_allclose(float(value), float(their_loss.detach()), rtol=2e-5, atol=2e-6)
    model.zero_grad()
    their_loss.backward()
    flat = np.concatenate([parameter.grad.numpy().ravel() for parameter in model.parameters()])
    expected = [(path, flat[index]) for path, index in _places()]
    found = jax.tree.leaves(nnx.to_pure_dict(pull(batch, slope, temperature=temperature)))
    assert len(found) == len(expected)
    largest = max(np.abs(exact).max() for _, exact in expected)
    assert largest > 1e-4, "the case has no gradient"
    for (path, exact), mine in zip(expected, found, strict=True):
        np.testing.assert_allclose(
            np.asarray(mine) / largest, np.asarray(exact) / largest, atol=2e-5, err_msg=str(path)
        )


def bare(trainer: type, model: Any, **attributes: Any) -> Any:
    """A trainer that has what its loss reads and nothing else: no data, no optimizer."""
    made = object.__new__(trainer)
    made.accelerator = accelerate.Accelerator(cpu=True)
    made.model = model
    made._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    made._total_train_tokens = 0
    made._tp_size = 1
    made.aux_loss_enabled = False
    for name, value in attributes.items():
        setattr(made, name, value)
    return made
