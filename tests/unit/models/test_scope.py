"""Operations carry the path of the module that they are of, and compile to the same program."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from tests.unit.models.conftest import CONFIGS

from fornax import adapters
from fornax.models import DecoderConfig, abstract_decoder, create_decoder
from fornax.models.layout import flat_variables
from fornax.train.tasks.pretrain import next_token_loss

ROWS = {
    **{name: jnp.ones((2, 8), jnp.int32) for name in ("tokens", "targets", "segment_ids")},
    "positions": jnp.tile(jnp.arange(8, dtype=jnp.int32), (2, 1)),
    "loss_weights": jnp.ones((2, 8)),
}


Name = tuple[str, ...]
"""The parts of an operation's name, cut at whatever lies between modules and transformations."""


def _names(jaxpr: Jaxpr, above: Name = ()) -> Iterator[Name]:
    """Of each operation of a traced function, and of those inside them."""
    for eqn in jaxpr.eqns:
        own = (*above, *re.split(r"[/()]+", str(eqn.source_info.name_stack)))
        yield (*own, eqn.primitive.name)
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, Jaxpr)):
            inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if isinstance(inner, Jaxpr):
                yield from _names(inner, own)


def _is_named(path: Name, names: Iterable[Name]) -> bool:
    """Whether the parts of a path are in some name, in order."""

    def within(name: Name) -> bool:
        rest = iter(name)
        return all(part in rest for part in path)

    return any(map(within, names))


def _loss(config: DecoderConfig) -> tuple[Callable[[nnx.State], jax.Array], nnx.State]:
    graphdef, state = nnx.split(abstract_decoder(config))
    mtp = 0.1 if config.num_mtp_modules else None

    def loss(state: nnx.State) -> jax.Array:
        return next_token_loss(nnx.merge(graphdef, state), ROWS, remat="dots", mtp_weight=mtp).total

    return loss, state


def gradient(config: DecoderConfig) -> jax.stages.Lowered:
    """That of the loss, lowered."""
    loss, state = _loss(config)
    return jax.jit(jax.grad(loss)).lower(state)


def _traced(function: Callable[..., object], *args: object) -> set[Name]:
    return set(_names(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_module_with_parameters_names_its_operations(name: str) -> None:
    names = _traced(*_loss(CONFIGS[name]))
    paths = flat_variables(abstract_decoder(CONFIGS[name]))
    modules = {tuple(path.split("/")[:-1]) for path in paths}
    modules.discard(("lm_head",))  # its product is part of the loss
    assert [path for path in modules if not _is_named(path, names)] == []
    assert _is_named(("loss", "dot_general"), names)
    # An operation of one module is in no other's scope, nor in its own twice.
    assert not _is_named(("mlp", "attention"), names)
    assert not _is_named(("o", "o"), names)


def test_modules_that_predict_further_tokens_name_theirs() -> None:
    config = dataclasses.replace(CONFIGS["windowed"], num_mtp_modules=2)
    names = _traced(*_loss(config))
    assert _is_named(("mtp", "projection", "dot_general"), names)
    assert _is_named(("mtp", "layer", "attention", "q"), names)
    assert _is_named(("mtp", "norm"), names)
    assert _is_named(("mtp_loss", "dot_general"), names)


def test_logits_are_of_the_output_projection() -> None:
    graphdef, state = nnx.split(abstract_decoder(CONFIGS["biased"]))
    names = _traced(lambda state: nnx.merge(graphdef, state)(ROWS["tokens"]), state)
    assert _is_named(("lm_head", "dot_general"), names)


def test_an_adapter_is_told_from_what_it_adapts() -> None:
    decoder = create_decoder(CONFIGS["windowed"], seed=0)
    adapters.attach(decoder, adapters.LoRA(rank=2), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(decoder)
    names = _traced(lambda state: nnx.merge(graphdef, state)(ROWS["tokens"]), state)
    assert _is_named(("attention", "q", "adapter", "dot_general"), names)
    own = {name for name in names if "adapter" not in name}
    assert _is_named(("attention", "q", "dot_general"), own)
    assert not _is_named(("q", "q"), names)


@pytest.mark.slow
def test_compiled_operations_of_both_passes_keep_their_names() -> None:
    text = gradient(CONFIGS["windowed"]).compile().as_text()
    names = re.findall(r'op_name="([^"]*)"', text or "")
    forward = {name for name in names if "transpose" not in name}
    backward = {name for name in names if "transpose" in name}
    for passes in (forward, backward):
        parts = {tuple(re.split(r"[/()]+", name)) for name in passes}
        assert _is_named(("layers", "attention", "o", "dot_general"), parts)
        assert _is_named(("layers", "attention", "core_attention"), parts)
        assert _is_named(("layers", "mlp", "down", "dot_general"), parts)
        assert _is_named(("embed",), parts)


_COMPILE = """
import contextlib, sys
import jax
if sys.argv[1] == "plain":
    class Nothing(contextlib.ContextDecorator):
        def __init__(self, name): pass
        def __enter__(self): pass
        def __exit__(self, *error): pass
    jax.named_scope = Nothing
from tests.unit.models.test_scope import CONFIGS, gradient
for name in ("windowed", "experts"):
    print(gradient(CONFIGS[name]).compile().as_text())
"""


@pytest.mark.exhaustive
def test_names_change_nothing_of_what_is_compiled() -> None:
    def compiled(kind: str) -> str:
        run = [sys.executable, "-c", _COMPILE, kind]
        root = Path(__file__).parents[3]
        done = subprocess.run(run, capture_output=True, text=True, cwd=root, check=True)
        tables = r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*"
        assert ("core_attention/" in done.stdout) == (kind == "named")
        return re.sub(tables, "", re.sub(r",? ?metadata=\{[^}]*\}", "", done.stdout), flags=re.M)

    assert compiled("named") == compiled("plain")
