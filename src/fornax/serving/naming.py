"""What a request's name and version stand for: a copy of a version, a function, or a refusal."""

from collections.abc import Callable, Iterable, Mapping

from fornax.config import ServingCode, ServingError, nearest
from fornax.serving.lifecycle import Instance
from fornax.serving.lifecycle.model import Model
from fornax.serving.v2.parameters import function_of

__all__ = ["Naming", "no_function"]


def no_function(instance: Instance, function: str) -> ServingError:
    """The refusal of a function that a version does not have."""
    known = instance.servable.functions
    guess = nearest(function, known)
    return ServingError(
        ServingCode.NOT_FOUND,
        f"version {instance.version} of {instance.source.name} has no function {function!r}; "
        f"{f'did you mean {guess}? ' if guess else ''}it has {', '.join(known)}",
    )


class Naming:
    """Finds models by name; `others` are names that someone else answers to.

    `known()` says whether the repository has been read: before, no name is known to be wrong.
    """

    def __init__(
        self, models: Mapping[str, Model], others: Iterable[str], known: Callable[[], bool]
    ):
        self._models = models
        self._others = others
        self._known = known

    def model(self, name: str) -> Model:
        """A model by its own name, without a function.

        Raises:
          ServingError: NOT_FOUND, with the nearest name; UNAVAILABLE before names are known.
        """
        model = self._models.get(name)
        if model is None:
            if not self._known():
                raise ServingError(
                    ServingCode.UNAVAILABLE,
                    "the server is starting and has not read its repository yet; try again",
                )
            guess = nearest(name, [*self._models, *self._others])
            hint = f"did you mean {guess}?" if guess else "GET /v2/repository/index lists all"
            raise ServingError(
                ServingCode.NOT_FOUND, f"the repository has no model {name!r}; {hint}"
            )
        return model

    def instance(self, name: str, version: str) -> Instance:
        """What answers to a model's name and a version, a label or "".

        Raises:
          ServingError: nothing does, and why.
        """
        model = self.model(name)
        if version not in model.routes:
            raise model.refusal(version)
        return model.routes[version]

    def find(self, name: str, version: str) -> tuple[Model, Instance, str]:
        """A model, what answers, and the function, from a name that may have both.

        Raises:
          ServingError: nothing answers, and why.
        """
        name, function = function_of(name)
        return self.model(name), self.instance(name, version), function
