"""FID beside SciPy's formula and closed forms, KID beside sums over pairs, the CLIP score."""

import numpy as np
import pytest
from scipy.linalg import sqrtm

from fornax.config.errors import ConfigError, DataError
from fornax.diffusion.metrics import FeatureStatistics, clip_score, fid, kid


def features(count: int, width: int, seed: int, shift: float = 0.0) -> np.ndarray:
    """Correlated features whose mean is far from 0, as those of a network are."""
    random = np.random.default_rng(seed)
    return random.normal(size=(count, width)) @ random.normal(size=(width, width)) + 3 + shift


def published_fid(one: np.ndarray, two: np.ndarray) -> float:
    """The formula as it was published, by SciPy's root of the product of covariances."""
    c1, c2 = np.cov(one, rowvar=False), np.cov(two, rowvar=False)
    root = sqrtm(c1 @ c2)
    return float(((one.mean(0) - two.mean(0)) ** 2).sum() + np.trace(c1 + c2 - 2 * root.real))


def test_fid_is_that_of_scipys_formula():
    one, two = features(400, 24, 0), features(300, 24, 1, 0.5)
    assert fid(one, two) == pytest.approx(published_fid(one, two), rel=1e-10)
    assert fid(one, two) == pytest.approx(fid(two, one), rel=1e-12)


def test_fid_of_normals_with_diagonal_covariances_is_the_closed_form():
    # Exact moments: rows +-a e_i have mean 0 and a diagonal covariance.
    scales = np.array([[1.0, 2.0, 0.5], [3.0, 1.0, 4.0]])
    one, two = (np.concatenate([np.diag(s), -np.diag(s)]) for s in scales)
    mean = np.array([1.0, -2.0, 0.25])
    deviations = scales * np.sqrt(2 / 5)
    closed = (mean**2).sum() + ((deviations[0] - deviations[1]) ** 2).sum()
    assert fid(one, two + mean) == pytest.approx(closed, rel=1e-12)


def test_fid_of_fewer_images_than_features_is_real_and_zero_for_one_set():
    # Covariances of rank 9 in 64 dimensions; SciPy's root of their product is singular there.
    one, two = features(10, 64, 2), features(10, 64, 3)
    assert fid(one, one) == pytest.approx(0.0, abs=1e-9 * np.trace(np.cov(one, rowvar=False)))
    # On the span of both sets, the rank of each at most, the distance is the same.
    basis = np.linalg.svd(np.concatenate([one, two]), full_matrices=False)[2]
    assert fid(one, two) == pytest.approx(fid(one @ basis.T, two @ basis.T), rel=1e-10)


def test_statistics_add_up_to_those_of_the_whole_set():
    # A mean of 1e6 beside deviations of 1: sums of squares would lose the covariance.
    rows = np.random.default_rng(4).normal(size=(90, 5)) + 1e6
    parts = [FeatureStatistics.of(part) for part in np.split(rows, [1, 40, 41])]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    np.testing.assert_allclose(total.covariance, np.cov(rows, rowvar=False), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(total.mean, rows.mean(0), rtol=1e-14)
    assert total.count == 90


def test_kid_is_the_mean_of_kernels_over_pairs_of_distinct_images():
    one, two = features(7, 3, 5), features(7, 3, 6)

    def k(x: np.ndarray, y: np.ndarray) -> float:
        return (sum(a * b for a, b in zip(x, y, strict=True)) / 3 + 1) ** 3

    pairs = [(i, j) for i in range(7) for j in range(7) if i != j]
    within = sum(k(one[i], one[j]) + k(two[i], two[j]) for i, j in pairs) / len(pairs)
    between = sum(k(x, y) for x in one for y in two) / 49
    found = kid(one, two, subsets=1, subset_size=7)
    assert found.mean == pytest.approx(within - 2 * between, rel=1e-10)
    assert found.deviation == 0


def test_kid_is_unbiased_and_sees_a_difference():
    random = np.random.default_rng(7)
    same, other = random.normal(size=(2, 600, 4))
    far = other + 0.5
    near = kid(same, other, subsets=200, subset_size=40)
    # The standard error over the subsets, which overlap, is at least the independent one.
    assert abs(near.mean) < 4 * near.deviation / np.sqrt(600 / 40)
    assert kid(same, far, subsets=200, subset_size=40).mean > 10 * abs(near.mean)
    assert kid(same, far, subset_size=40, seed=1) == kid(same, far, subset_size=40, seed=1)


def test_clip_score_is_the_cosine_of_pairs_and_never_below_zero():
    images = np.array([[3.0, 4.0], [1.0, 0.0], [2.0, 2.0]])
    texts = np.array([[6.0, 8.0], [-1.0, 0.0], [0.0, 5.0]])
    np.testing.assert_allclose(clip_score(images, texts), [100, 0, 100 / np.sqrt(2)])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: fid(np.ones((5, 3)), np.ones((5, 4))), DataError, "one encoder"),
        (lambda: fid(np.ones((1, 3)), np.ones((5, 3))), DataError, "at least 2"),
        (lambda: fid(np.ones(3), np.ones((5, 3))), DataError, r"\(3,\)"),
        (lambda: fid(np.full((2, 3), np.nan), np.ones((5, 3))), DataError, "image 0"),
        (lambda: kid(np.ones((5, 3)), np.ones((9, 3))), ConfigError, r"\[2, 5\]"),
        (lambda: clip_score(np.ones((2, 3)), np.ones((3, 3))), DataError, "one text for each"),
        (lambda: clip_score(np.zeros((2, 3)), np.ones((2, 3))), DataError, "pair 0"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_fix(call, error, says):
    with pytest.raises(error, match=says):
        call()
