"""Batches that a model draws itself and a judge rewards: pairs for DPO, groups for flow-GRPO.

Shapes: B rows of a batch, X the shape of an example, M steps of a sampler.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.diffusion.config import DiffusionTuneConfig
from fornax.diffusion.data import LettersConfig
from fornax.diffusion.letters import LETTERS, Judge, Letters
from fornax.diffusion.letters.dataset import STYLES
from fornax.diffusion.load import LoadedRun
from fornax.diffusion.methods import DPO, FlowGRPO
from fornax.diffusion.network import Network
from fornax.diffusion.preference import draw
from fornax.diffusion.prompts import text_arrays
from fornax.diffusion.samplers import ddim
from fornax.train import Hosts
from fornax.tune.advantages import group_relative

__all__ = ["Groups", "Pairs", "letters_reward", "only_drawn"]

Arrays = dict[str, np.ndarray]

_ETA = 0.7
"""Share of fresh noise of what pairs are drawn with."""


def letters_reward(letters: Letters) -> Callable[[Any, Any], np.ndarray]:
    """(images, prompts) to rewards (B,): 1 for the letter that a prompt asks for and 1 for its
    style, by the judge."""
    judge = Judge(letters)

    def reward(images_BX: Any, prompts: Any) -> np.ndarray:
        found = judge.judge(np.asarray(images_BX, np.float32))
        wanted = [prompt.split(" in ")[0].rpartition(" ") for prompt in prompts]
        letter = np.array([LETTERS.index(one) for _, _, one in wanted])
        style = np.array([STYLES.index(one) for one, _, _ in wanted])
        return (found.letter == letter).astype(np.float32) + (found.style == style)

    return reward


class _Drawn:
    """Batches of what a model draws for prompts of letters; a step's are always the same."""

    def __init__(self, config: DiffusionTuneConfig, method: DPO | FlowGRPO, run: LoadedRun) -> None:
        data = config.data
        if not isinstance(data, LettersConfig):
            raise ConfigError(
                f"method.type={method.type} rewards what its judge reads, and there is one "
                "for letters only; set data.type to letters"
            )
        self._config, self._run = config, run
        self._letters = Letters(
            colour=data.colour, size=data.size, count=data.count, seed=data.seed
        )
        self._held_out = replace(self._letters, held_out=True) if method.held_out else None
        self._reward = letters_reward(self._letters)
        self._step = 0
        self.rows = config.batch_size
        """Rows of a batch: those of the config, then rows of weight 0."""
        self._graph: Any = None
        self._drawn = jax.jit(self._draw)
        grpo = isinstance(method, FlowGRPO)
        steps, eta = (method.steps, method.eta) if grpo else (config.sample.steps, _ETA)
        self._table = ddim(run.objective.schedule(steps), eta)

    def __iter__(self) -> "_Drawn":
        return self

    def prompts(self, step: int, count: int) -> list[str]:
        """Captions of random examples, every pair of letter and style equally likely."""
        random = np.random.default_rng([self._config.seed, step, 7])
        examples = random.integers(len(self._letters), size=count)
        sets = [self._letters] * count
        if self._held_out is not None:
            pairs = [len(one.pairs) for one in (self._letters, self._held_out)]
            other = random.random(count) < pairs[1] / sum(pairs)
            sets = [self._held_out if yes else self._letters for yes in other]
        return [one[int(i)].prompt for one, i in zip(sets, examples, strict=True)]

    def draw(self, network: Network, arrays: Arrays, seed: tuple[int, int]) -> Any:
        """Trajectories of a model."""
        graph, state = nnx.split(network)
        if self._graph is None:
            self._graph = graph
        key = jax.random.fold_in(jax.random.key(seed[0]), seed[1])
        return self._drawn(state, arrays, key)

    def _draw(self, state: Any, arrays: Arrays, key: jax.Array) -> Any:
        network, objective = nnx.merge(self._graph, state), self._run.objective
        condition = network.condition(arrays)
        count = next(iter(arrays.values())).shape[0]
        start = jax.random.normal(jax.random.fold_in(key, 2**20), (count, *self._letters.shape))
        return draw(
            lambda x, point: network(x, objective, point, condition),
            start,
            self._table,
            key,
            prediction=objective.prediction,
            sigma_data=objective.sigma_data,
        )

    def padded(self, batch: Arrays) -> Arrays:
        """A batch with copies of its last row behind it, whose weight is 0."""
        more = self.rows - len(batch["weight"])
        found = {
            name: np.pad(array, [(0, more)] + [(0, 0)] * (array.ndim - 1), mode="edge")
            for name, array in batch.items()
        }
        found["weight"][self.rows - more :] = 0
        return found

    def common(self, step: int, count: int) -> Arrays:
        places = np.arange(count, dtype=np.int32)
        return {
            "weight": np.ones(count, np.float32),
            "example": places,
            "step": np.full(count, step, np.int32),
            "place": places,
        }

    def state(self) -> dict[int, dict[str, int]]:
        return {0: {"step": self._step}}

    def restore(self, state: dict[int, dict[str, int]], *, allow_changes: bool = False) -> None:
        del allow_changes
        self._step = state[0]["step"]

    def close(self) -> None:
        """Nothing is read ahead."""


class Pairs(_Drawn):
    """Pairs of two images of one prompt, the better first, drawn once by the reference."""

    def __init__(self, config: DiffusionTuneConfig, method: DPO, run: LoadedRun) -> None:
        super().__init__(config, method, run)
        self._draws = method.draws
        self._pairs: list[tuple[np.ndarray, str]] | None = None

    def _made(self) -> list[tuple[np.ndarray, str]]:
        if self._pairs is None:
            batch, draws = 64, self._draws
            self._pairs = []
            for part in range(-(-draws // batch)):
                prompts = self.prompts(part, min(batch, draws - part * batch))
                arrays = text_arrays(self._run.facts.prompts, prompts * 2)
                path = self.draw(self._run.network, arrays, (self._config.seed, part))
                images = np.asarray(path.x_MBX[-1])
                rewards = self._reward(images, prompts * 2).reshape(2, -1)
                pairs = images.reshape(2, len(prompts), *images.shape[1:])
                for p in np.flatnonzero(rewards[0] != rewards[1]):
                    order = [0, 1] if rewards[0, p] > rewards[1, p] else [1, 0]
                    self._pairs.append((pairs[order, p], prompts[p]))
            if not self._pairs:
                raise ConfigError(
                    f"the judge prefers none of {draws} pairs that the model drew; raise "
                    "method.draws, or begin with a model that draws some letters right"
                )
        return self._pairs

    def __next__(self) -> Arrays:
        pairs, count = self._made(), self._config.batch_size
        random = np.random.default_rng([self._config.seed, self._step, 8])
        chosen = [pairs[int(i)] for i in random.integers(len(pairs), size=count)]
        found = {
            "images": np.stack([images for images, _ in chosen]),
            **self.common(self._step, count),
            **text_arrays(self._run.facts.prompts, [prompt for _, prompt in chosen]),
        }
        self._step += 1
        return self.padded(found)


class Groups(_Drawn):
    """Groups of images of one prompt, drawn by the model as it is now, with advantages."""

    def __init__(self, config: DiffusionTuneConfig, method: FlowGRPO, run: LoadedRun) -> None:
        super().__init__(config, method, run)
        self._group = method.group
        if config.batch_size % method.group:
            raise ConfigError(
                f"batch_size={config.batch_size} is not a multiple of method.group="
                f"{method.group}; each prompt has that many images"
            )
        self._model: Callable[[], nnx.Module] | None = None
        self._rewards = np.zeros(1)

    def follow(self, step: int, model: Callable[[], nnx.Module]) -> None:
        """`PostTraining.follow`."""
        self._step, self._model = step, model

    def observe(self) -> Mapping[str, float]:
        """The mean reward, of 2, of what was drawn."""
        return {"reward": float(self._rewards.mean())}

    def __next__(self) -> Arrays:
        group, count = self._group, self._config.batch_size
        prompts = self.prompts(self._step, count // group)
        prompts = [prompt for prompt in prompts for _ in range(group)]
        arrays = text_arrays(self._run.facts.prompts, prompts)
        assert self._model is not None
        network: Any = self._model()
        path = self.draw(network, arrays, (self._config.seed + 2, self._step))
        self._rewards = self._reward(np.asarray(path.x_MBX[-1]), prompts)
        advantages = group_relative(self._rewards.reshape(-1, group)).reshape(-1)
        random = int((self._table.noise > 0).sum())
        found = {
            "path": np.moveaxis(np.asarray(path.x_MBX[: random + 1]), 0, 1),
            "logps": np.asarray(path.logps_MB[:random]).T,
            "advantages": advantages.astype(np.float32),
            **self.common(self._step, count),
            **arrays,
        }
        self._step += 1
        return self.padded(found)


def only_drawn(stream: _Drawn) -> Callable[[str, Hosts], Any]:
    """`Task.batches` of a stream in one process."""

    def batches(split: str, hosts: Hosts) -> Any:
        if split != "train" or hosts.count > 1:
            raise ConfigError(
                "what the model draws is trained on in one process and not evaluated; leave "
                "eval.every null and run one process"
            )
        stream.rows = hosts.size(stream.rows)
        return stream

    return batches
