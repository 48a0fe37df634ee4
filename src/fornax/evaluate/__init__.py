"""`fornax eval`: perplexity, verified answers, pass@k, comparisons, tasks of lm-eval-harness.

What needs JAX is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fornax.evaluate.config import EvaluateConfig
from fornax.evaluate.statistics import Estimate, pass_at_k, ratio, share

if TYPE_CHECKING:
    from fornax.evaluate.comparison import Comparison, compare
    from fornax.evaluate.generative import Generative, Judge
    from fornax.evaluate.perplexity import Perplexity
    from fornax.evaluate.results import Results
    from fornax.evaluate.run import evaluate

__all__ = [
    "Comparison",
    "Estimate",
    "EvaluateConfig",
    "Generative",
    "Judge",
    "Perplexity",
    "Results",
    "compare",
    "evaluate",
    "pass_at_k",
    "ratio",
    "share",
]

_HOMES = {
    "Comparison": "comparison",
    "Generative": "generative",
    "Judge": "generative",
    "Perplexity": "perplexity",
    "Results": "results",
    "compare": "comparison",
    "evaluate": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fornax.evaluate.{_HOMES[name]}"), name)
