"""How near a set of images is to another, by features that the user gives: FID, KID, CLIP score.

No network is here: features are whatever an encoder of the user's says of images (Inception's pool
for published figures of FID and KID, CLIP's embeddings for the CLIP score), as NumPy arrays.

Shapes: N images, M others, D features.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fornax.config.errors import ConfigError, DataError

__all__ = ["FeatureStatistics", "KernelDistance", "clip_score", "fid", "kid"]

Float = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FeatureStatistics:
    """Mean and covariance of features, from which `fid` is; they add up over batches.

    Attributes:
      count: images, N.
      mean: (D,) float64.
      scatter: (D, D) float64, the sum over images of the outer products of features less the mean;
        the covariance is this over N - 1.
    """

    count: int
    mean: Float
    scatter: Float

    @classmethod
    def of(cls, features_ND: ArrayLike) -> "FeatureStatistics":
        """Of one batch of features.

        Args:
          features_ND: (N, D), any real dtype, N >= 1.

        Raises:
          DataError: another shape, or a value that is not finite.
        """
        rows = _rows(features_ND, "features")
        mean = rows.mean(0)
        away = rows - mean
        return cls(count=len(rows), mean=mean, scatter=away.T @ away)

    def __add__(self, other: "FeatureStatistics") -> "FeatureStatistics":
        """Of both sets together (Chan et al. 1983): nothing is lost to a far mean.

        Raises:
          DataError: features of another width.
        """
        _same_width(self.mean, other.mean)
        count = self.count + other.count
        step = other.mean - self.mean
        between = np.outer(step, step) * (self.count * other.count / count)
        return FeatureStatistics(
            count=count,
            mean=self.mean + step * (other.count / count),
            scatter=self.scatter + other.scatter + between,
        )

    @property
    def covariance(self) -> Float:
        """(D, D), unbiased, as `numpy.cov` has it.

        Raises:
          DataError: of one image, which has none.
        """
        if self.count < 2:
            raise DataError(f"{self.count} image has no covariance; give features of at least 2")
        return self.scatter / (self.count - 1)


def fid(first: FeatureStatistics | ArrayLike, second: FeatureStatistics | ArrayLike) -> float:
    """Frechet distance between two sets' features, taken as normal (Heusel et al. 2017).

    |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2)). The root's trace is the sum of the singular
    values of F1 F2^T, where C = F^T F: no root of a product that is not symmetric is taken, so
    singular covariances, of fewer images than features, give no imaginary parts and need no term
    added to their diagonals.

    Args:
      first: (N, D) features, or their statistics.
      second: (M, D) features, or their statistics.

    Returns:
      The distance, 0 or more. It falls with N: compare figures of equal counts.

    Raises:
      DataError: sets of other widths, of one image, or with values that are not finite.
    """
    one, two = (
        s if isinstance(s, FeatureStatistics) else FeatureStatistics.of(s) for s in (first, second)
    )
    _same_width(one.mean, two.mean)
    c1, c2 = one.covariance, two.covariance
    cross = np.linalg.svd(_factor(c1) @ _factor(c2).T, compute_uv=False).sum()
    apart = one.mean - two.mean
    return float(max(apart @ apart + np.trace(c1) + np.trace(c2) - 2 * cross, 0.0))


def _factor(covariance: Float) -> Float:
    """(D, D) F with covariance = F^T F; negative eigenvalues are rounding, and count as 0."""
    values, vectors = np.linalg.eigh(covariance)
    return np.sqrt(np.maximum(values, 0))[:, None] * vectors.T


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelDistance:
    """A kernel distance over subsets.

    Attributes:
      mean: over the subsets; around 0 for equal distributions, and below it as often as above.
      deviation: standard deviation over the subsets; 0 of one.
    """

    mean: float
    deviation: float


def kid(
    first_ND: ArrayLike,
    second_MD: ArrayLike,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
) -> KernelDistance:
    """Kernel distance between two sets' features (Binkowski et al. 2018).

    The squared maximum mean discrepancy under k(x, y) = (x . y / D + 1)^3, by the unbiased
    estimator, over random subsets without repetition. Unlike FID it does not depend on the count.

    Args:
      first_ND: (N, D) features.
      second_MD: (M, D) features.
      subsets: how many.
      subset_size: images of each set in a subset, at most N and M; equal to both, a subset is all
        there is.
      seed: of the choice of subsets.

    Raises:
      ConfigError: no subset, or one of less than two images or of more than a set has.
      DataError: sets of other widths, or with values that are not finite.
    """
    one, two = _rows(first_ND, "first"), _rows(second_MD, "second")
    _same_width(one[0], two[0])
    most = min(len(one), len(two))
    if subsets < 1 or not 2 <= subset_size <= most:
        raise ConfigError(
            f"subsets={subsets}, subset_size={subset_size} of {len(one)} and {len(two)} images; "
            f"use subsets >= 1 and a subset_size in [2, {most}]"
        )
    random = np.random.default_rng(seed)
    found = [
        _discrepancy(
            one[random.choice(len(one), subset_size, replace=False)],
            two[random.choice(len(two), subset_size, replace=False)],
        )
        for _ in range(subsets)
    ]
    return KernelDistance(mean=float(np.mean(found)), deviation=float(np.std(found)))


def _discrepancy(x_ND: Float, y_ND: Float) -> float:
    """Unbiased squared discrepancy of two subsets of one size N: pairs of an image with itself do
    not count."""
    count, width = x_ND.shape

    def kernel(a: Float, b: Float) -> Float:
        return np.asarray((a @ b.T / width + 1) ** 3)

    within = sum(k.sum() - np.trace(k) for k in (kernel(x_ND, x_ND), kernel(y_ND, y_ND)))
    return float(within / (count * (count - 1)) - 2 * kernel(x_ND, y_ND).mean())


def clip_score(images_ND: ArrayLike, texts_ND: ArrayLike) -> Float:
    """CLIP score of each image with its own text (Hessel et al. 2021).

    Args:
      images_ND: (N, D) embeddings of images, of any length each.
      texts_ND: (N, D) embeddings of the texts, by the same model.

    Returns:
      (N,) 100 max(cosine, 0), whose mean is the set's score. Hessel et al. write 2.5 for 100.

    Raises:
      DataError: other shapes, a value that is not finite, or an embedding of zeros.
    """
    images, texts = _rows(images_ND, "images"), _rows(texts_ND, "texts")
    if images.shape != texts.shape:
        raise DataError(
            f"embeddings of images have shape {images.shape} and of texts {texts.shape}; give one "
            "text for each image, both embedded by one model"
        )
    lengths = np.linalg.norm(images, axis=1) * np.linalg.norm(texts, axis=1)
    if not lengths.all():
        raise DataError(
            f"pair {int(np.argmin(lengths))} has an embedding of zeros, which points nowhere; "
            "leave it out"
        )
    return np.asarray(100 * np.maximum((images * texts).sum(1) / lengths, 0.0))


def _rows(values: ArrayLike, name: str) -> Float:
    """The features in float64."""
    rows = np.asarray(values, np.float64)
    if rows.ndim != 2 or 0 in rows.shape:
        raise DataError(f"{name} of shape {rows.shape}; give (images, features), at least one each")
    finite = np.isfinite(rows).all(1)
    if not finite.all():
        raise DataError(
            f"{name} of image {int(np.argmin(finite))} are not all finite; leave it out, or look "
            "for NaN in what was drawn"
        )
    return rows


def _same_width(one: Float, two: Float) -> None:
    if one.shape != two.shape:
        raise DataError(
            f"one set has {len(one)} features per image and the other {len(two)}; take both from "
            "one encoder"
        )
