"""Filters and draws against float64 definitions that sort, and the same alone as beside others.

Legend: M rows, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels, mesh
from fornax.config.errors import KernelError
from fornax.kernels import reductions
from fornax.kernels._layer.top_k_top_p import filtered, limit_of_row

ALL = np.iinfo(np.int32).max
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["native", "xla"])
SLOWER = pytest.mark.parametrize(
    "implementation", ["native", pytest.param("xla", marks=pytest.mark.slow)]
)
FILTER = jax.jit(kernels.filter_logits, static_argnames="implementation")
SAMPLE = jax.jit(kernels.sample_tokens, static_argnames="implementation")

RULES = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_p": 1e-6},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7},
    {"top_k": 200, "top_p": 0.97},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 2.0},
]


def logits_of(rows, vocab, scale=4.0, seed=0):
    rng = np.random.default_rng(seed)
    return (scale * rng.normal(size=(rows, vocab))).astype(np.float32)


def filters_of(rules):
    """Each row's filters; temperature 0.8 where a rule says nothing else."""
    every = [{"temperature": 0.8, "top_k": ALL, "top_p": 1.0, "min_p": 0.0} | one for one in rules]
    return kernels.TokenFilters(
        np.array([one["temperature"] for one in every], np.float32),
        np.array([one["top_k"] for one in every], np.int32),
        np.array([one["top_p"] for one in every], np.float32),
        np.array([one["min_p"] for one in every], np.float32),
    )


def probabilities(logits, rule):
    """Of a row's tokens, by sorting in float64; 0 for those that are left out."""
    x = logits.astype(np.float64) / rule.get("temperature", 0.8)
    p = np.exp(x - x.max())
    p = np.where(p >= rule.get("min_p", 0.0), p, 0)
    if rule.get("top_k", ALL) < np.count_nonzero(p):
        p = np.where(x >= np.sort(x)[-rule["top_k"]], p, 0)
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    least = p[order[before < np.float32(rule.get("top_p", 1.0)) * p.sum()][-1]]
    p = np.where(p >= least, p, 0)
    return p / p.sum()


@IMPLEMENTATIONS
@pytest.mark.parametrize("scale", [0.3, 4.0])
@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 613, 8192])
def test_tokens_kept_are_those_of_the_definition(vocab, scale, implementation):
    logits = logits_of(len(RULES), vocab, scale)
    cut = np.asarray(FILTER(logits, filters_of(RULES), implementation=implementation))
    for row, rule in enumerate(RULES):
        kept = np.full(vocab, True)
        if rule.get("temperature") != 0.0:
            kept = probabilities(logits[row], rule) > 0
        np.testing.assert_array_equal(cut[row], np.where(kept, logits[row], -np.inf), str(rule))


@pytest.mark.slow
@IMPLEMENTATIONS
def test_tokens_kept_of_a_large_vocabulary(implementation):
    """With float32 sums a share of 128,256 tokens ends within a few tokens of the definition."""
    logits = logits_of(len(RULES), 128_256)
    cut = np.asarray(FILTER(logits, filters_of(RULES), implementation=implementation))
    for row, rule in enumerate(RULES[:-2]):
        p = probabilities(logits[row], rule | {"top_p": 1.0})
        kept = np.isfinite(cut[row])
        assert cut[row][kept].min() > logits[row][~kept].max()
        if (share := rule.get("top_p")) is None:
            np.testing.assert_array_equal(kept, p > 0)
        else:
            last = p[kept].min()
            assert p[kept].sum() >= share * (1 - 1e-5)
            assert p[kept].sum() - last < share + 1e-5


@IMPLEMENTATIONS
def test_equal_logits_stay_or_go_together(implementation):
    row = np.zeros(2000, np.float32)
    row[5:15], row[500:1100] = 3.0, 2.0
    rules = [{"top_k": 3}, {"top_k": 11}, {"top_p": 0.01}, {"top_p": 0.3}, {"top_k": 1500}]
    cut = FILTER(np.tile(row, (5, 1)), filters_of(rules), implementation=implementation)
    assert np.isfinite(cut).sum(1).tolist() == [10, 610, 10, 610, 2000]
    # Neighbours among floating-point numbers are told apart.
    row = np.float32(1.0) + np.arange(700, dtype=np.float32) * np.float32(2.0**-23)
    cut = FILTER(row[None], filters_of([{"top_k": 300}]), implementation="native")
    assert np.flatnonzero(np.isfinite(cut[0])).tolist() == list(range(400, 700))


@SLOWER
def test_forbidden_and_broken_rows(implementation):
    logits = np.full((6, 300), -np.inf, np.float32)
    logits[0, 77] = -5.0
    logits[1, [3, 250]] = 1.0, -1e30
    logits[3:] = logits_of(3, 300)
    logits[3, 299], logits[4, 0], logits[5, 100] = np.nan, np.inf, -np.inf
    for rule in (*RULES, {}):
        filters = filters_of([rule] * 6)
        tokens = SAMPLE(
            logits, np.full((6, 2), 0.9, np.float32), filters, implementation=implementation
        )
        assert tokens[:5].tolist() == [77, 3, -1, -1, -1]
        assert tokens[5] not in (-1, 100)
        cut = FILTER(logits, filters, implementation=implementation)
        assert kernels.argmax(cut)[:5].tolist() == [77, 3, -1, -1, -1]


@SLOWER
@pytest.mark.parametrize("vocab", [1, 40, 700])
def test_draws_follow_the_distribution(vocab, implementation):
    count = 20_000
    for rule in ({}, {"top_k": 12}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.05}):
        row = logits_of(1, vocab, 1.5)[0]
        uniforms = np.random.default_rng(vocab).random((count, 2), np.float32)
        tokens = SAMPLE(
            np.tile(row, (count, 1)),
            uniforms,
            filters_of([rule] * count),
            implementation=implementation,
        )
        p = probabilities(row, rule)
        found = np.bincount(tokens, minlength=vocab)
        assert not found[p == 0].any()
        likely = p * count >= 5
        # Rare tokens count as one cell.
        expected = np.append(p[likely], p[~likely].sum()) * count
        seen = np.append(found[likely], found[~likely].sum())
        cells = expected > 0
        statistic = ((seen - expected)[cells] ** 2 / expected[cells]).sum()
        freedom = cells.sum() - 1
        assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


@pytest.mark.parametrize("vocab", [613, 8192])
def test_native_and_formula_draw_the_same_tokens(vocab):
    """Up to rounding, so that a measured choice for some numbers of rows changes next to none."""
    rules = RULES * 8
    logits, filters = logits_of(len(rules), vocab), filters_of(rules)
    uniforms = np.random.default_rng(1).random((len(rules), 2), np.float32)
    ours, plain = (SAMPLE(logits, uniforms, filters, implementation=i) for i in ("native", "xla"))
    np.testing.assert_array_equal(ours, plain)


@SLOWER
def test_a_row_is_the_same_whatever_is_beside_it(implementation):
    rules = RULES * 4
    logits, filters = logits_of(len(rules), 4099, 1.0), filters_of(rules)
    uniforms = np.random.default_rng(2).random((len(rules), 2), np.float32)
    cut = FILTER(logits, filters, implementation=implementation)
    tokens = SAMPLE(logits, uniforms, filters, implementation=implementation)
    # What was filtered before is drawn from as it is.
    no_filter = filters_of([{"temperature": rule.get("temperature", 0.8)} for rule in rules])
    np.testing.assert_array_equal(
        SAMPLE(cut, uniforms, no_filter, implementation=implementation), tokens
    )
    for part in (slice(0, 1), slice(5, 8), slice(11, 60), slice(3, 60, 15)):
        some = kernels.TokenFilters(*(x[part] for x in filters))
        np.testing.assert_array_equal(
            FILTER(logits[part], some, implementation=implementation), cut[part]
        )
        np.testing.assert_array_equal(
            SAMPLE(logits[part], uniforms[part], some, implementation=implementation), tokens[part]
        )


def test_search_of_least_depths_and_bisection_agree():
    """The near search knows its limits below the 128th depth; bisection must find the same."""
    for seed in range(5):
        row = logits_of(1, 2000, 1.0, seed)[0]
        depth_MGL = reductions.split((row.max() - row)[None], np.inf)
        weight_MGL = jnp.exp(-depth_MGL)
        for top_k, top_p in [(50, 1.0), (100, 0.9), (2000, 0.03)]:
            filters = filters_of([{"temperature": 1.0, "top_k": top_k, "top_p": top_p}])
            near = jax.jit(filtered)(depth_MGL, weight_MGL, filters)[0]
            limit = jax.jit(limit_of_row)(
                depth_MGL[0], weight_MGL[0], jnp.int32(top_k), jnp.float32(top_p)
            )
            np.testing.assert_array_equal(near > 0, depth_MGL[0] <= limit)


def test_what_does_not_fit_is_named():
    logits, filters = logits_of(3, 10), filters_of([{}] * 3)
    uniforms = jnp.zeros((3, 2))
    with pytest.raises(KernelError, match=r"logits\(3, 10\) of float16 must be float32"):
        kernels.filter_logits(jnp.asarray(logits, jnp.float16), filters)
    with pytest.raises(KernelError, match=r"top_k_M\(3,\) of float32 must be int32 \[M\]"):
        kernels.sample_tokens(
            jnp.asarray(logits), uniforms, filters._replace(top_k_M=filters.top_p_M)
        )
    with pytest.raises(KernelError, match=r"uniforms\(3, 1\)"):
        kernels.sample_tokens(jnp.asarray(logits), uniforms[:, :1], filters)


def test_what_xla_divides_over_devices_is_left_to_it():
    logits, filters = jnp.asarray(logits_of(3, 100)), filters_of([{"top_k": 5}] * 3)
    with mesh.use_mesh(mesh.make_mesh(mesh.MeshConfig(tensor=2), jax.devices()[:2])):
        with pytest.raises(KernelError, match="divides the call over 2 devices"):
            kernels.filter_logits(logits, filters, implementation="native")
        divided = kernels.filter_logits(logits, filters)
    np.testing.assert_array_equal(divided, kernels.filter_logits(logits, filters))
