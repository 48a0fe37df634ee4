"""The skip rule, against plain Python."""

import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.train.guard import SkipConfig, judge, start_guard


def decide(config: SkipConfig, norms: list[float], losses: list[float] | None = None) -> list[bool]:
    run = jax.jit(
        lambda guard, loss, norm, weight: judge(config, guard, loss=loss, norm=norm, weight=weight)
    )
    guard, out = start_guard(config), []
    for i, norm in enumerate(norms):
        loss = losses[i] if losses else 1.0
        accept, guard = run(guard, jnp.float32(loss), jnp.float32(norm), jnp.float32(8.0))
        out.append(bool(accept))
    return out


def expected(config: SkipConfig, norms: list[float]) -> list[bool]:
    window: list[float] = []
    seen, out = 0, []
    for norm in norms:
        accept = math.isfinite(norm)
        if accept and seen >= config.warmup and config.outlier_factor is not None:
            accept = norm <= config.outlier_factor * statistics.median_high(window)
        if math.isfinite(norm):
            window = [*window, norm][-config.window :]
            seen += 1
        out.append(accept)
    return out


def test_only_non_finite_is_skipped_by_default():
    assert decide(SkipConfig(), [1.0, math.nan, math.inf, 1e30, 1.0]) == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_loss_that_is_not_finite_is_skipped_though_gradients_are():
    assert decide(SkipConfig(), [1.0, 1.0], [math.nan, 2.0]) == [False, True]


def test_a_batch_without_weight_teaches_nothing():
    accept, _ = judge(
        SkipConfig(),
        start_guard(SkipConfig()),
        loss=jnp.float32(0),
        norm=jnp.float32(0),
        weight=jnp.float32(0),
    )
    assert not accept


@pytest.mark.parametrize(("window", "warmup"), [(1, 1), (4, 2), (5, 5), (8, 3)])
def test_outliers_match_a_plain_median_of_the_window(window: int, warmup: int):
    config = SkipConfig(outlier_factor=3.0, window=window, warmup=warmup)
    rng = np.random.default_rng(window)
    norms = [float(np.float32(x)) for x in rng.lognormal(0, 1.2, 60)]
    norms[10] = math.nan
    got = decide(config, norms)
    assert got == expected(config, norms)
    assert window == 1 or not all(got[11:])


def test_a_lasting_change_of_scale_is_accepted_after_half_a_window():
    config = SkipConfig(outlier_factor=4.0, window=8, warmup=4)
    got = decide(config, [1.0] * 8 + [100.0] * 8)
    assert got == [True] * 8 + [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    "wrong",
    [{"outlier_factor": 1.0}, {"window": 0}, {"warmup": 65}, {"max_consecutive": 0}],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict):
    with pytest.raises(ConfigError):
        SkipConfig(**wrong)
