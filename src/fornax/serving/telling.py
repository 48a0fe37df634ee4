"""What a host tells of its models when it is asked: counters, and how shadows compare."""

from collections.abc import Iterable
from typing import Any

from fornax.config import ServingCode, ServingError
from fornax.serving.execution.counters import ModelStatistics
from fornax.serving.lifecycle.model import Model

__all__ = ["shadow_report", "statistics"]


def statistics(models: Iterable[Model], version: str) -> list[ModelStatistics]:
    """Counters of the copies in memory, of all versions (empty) or of a number or label."""
    return [
        each.servable.statistics()
        for model in models
        for each in model.instances()
        if not version or each in (model.routes.get(version),) or str(each.version) == version
    ]


def shadow_report(model: Model) -> dict[str, Any]:
    """How the answers of a model's shadow compare with the main ones, as JSON has it.

    Raises:
      ServingError: it has no shadow, or one that is not ready.
    """
    if model.shadowing is not None:
        return model.shadowing.report()
    settings = model.settings.shadow
    if settings is None:
        text = f"{model.name} has no shadow; put shadow: {{version: N}} into its serving.yaml"
    elif problem := model.shadow_problem():
        text = f"version {settings.version} of {model.name} is no shadow: {problem}"
    else:
        reason = model.reason(settings.version) or "none answers beside it"
        text = f"version {settings.version}, the shadow of {model.name}, is not ready: {reason}"
    raise ServingError(ServingCode.FAILED_PRECONDITION, text)
