"""Tasks that start from a trained denoiser: distillation to few steps, DPO, flow-GRPO.

The model of such a run is the network that is trained, with those beside it that its loss asks: a
frozen `teacher`, which is where it began, and for DMD2 `fake`, trained on what it draws.

Shapes: B rows of a batch, X the shape of an example, M steps of a sampler.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fornax.diffusion.config import DiffusionTuneConfig
from fornax.diffusion.distill import (
    Claim,
    consistency_losses,
    few_step_sample,
    matching_losses,
    solver_levels,
)
from fornax.diffusion.guidance import guided
from fornax.diffusion.load import LoadedRun
from fornax.diffusion.methods import DMD2, DPO, Consistency, FlowGRPO
from fornax.diffusion.network import Network
from fornax.diffusion.objectives import example_noise, example_uniform, stratified
from fornax.diffusion.predictions import Point, to_data
from fornax.diffusion.preference import diffusion_dpo, flow_grpo
from fornax.diffusion.prompts import text_arrays
from fornax.diffusion.rollouts import Groups, Pairs, only_drawn
from fornax.diffusion.samplers import ddim, lcm
from fornax.mesh import Rules, tree_shardings
from fornax.train import Loss, PostTraining, Task

__all__ = ["learner_task"]


class Learner(Network):
    """A network that is trained, and those that its loss asks.

    Attributes:
      teacher: where it began, frozen.
      fake: of what it draws, trained beside it; None where no loss asks it.
    """

    def __init__(self, network: Network, teacher: Network, fake: Network | None):
        """Take the parts of `network` as its own."""
        super().__init__(network.denoiser, network.encoder, network.takes)
        self.teacher = teacher
        self.fake = nnx.data(fake)


def learner_task(config: DiffusionTuneConfig, run: LoadedRun, task: Task[Network]) -> Task[Network]:
    """The task of a run whose `method` is not denoising.

    Args:
      config: the run.
      run: where it begins, the teacher or reference; with the objective of the run.
      task: the denoising task of the same config, whose data and samples it keeps.

    Raises:
      ConfigError: a method that draws letters on other data, or a batch that groups do not divide.
    """
    method = config.method
    fake = isinstance(method, DMD2)
    trained = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("teacher")))

    make = task.build

    def build(rngs: nnx.Rngs) -> Learner:
        return Learner(make(rngs), make(rngs), make(rngs) if fake else None)

    def pretrained(mesh: Mesh, rules: Rules) -> Learner:
        copies = [nnx.clone(run.network) for _ in range(3)]
        made = Learner(copies[0], copies[1], copies[2] if fake else None)
        graph, state = nnx.split(made)
        return nnx.merge(graph, jax.device_put(state, tree_shardings(state, mesh, rules)))

    post: PostTraining[Any] = PostTraining(trained=trained)
    found: Task[Any] = replace(task, build=build, pretrained=pretrained, post=post, evaluate=None)
    match method:
        case Consistency():
            return replace(found, loss=partial(_consistency, config, method, run))
        case DMD2():
            return replace(found, loss=partial(_dmd2, config, method, run))
        case DPO():
            stream = Pairs(config, method, run)
            loss = partial(_dpo, config, method, run)
            return replace(found, loss=loss, batches=only_drawn(stream), unit="pairs")
        case FlowGRPO():
            groups = Groups(config, method, run)
            return replace(
                found,
                loss=partial(_grpo, config, method, run),
                batches=only_drawn(groups),
                post=replace(post, follow=groups.follow, observe=groups.observe),
            )
    raise ValueError(f"{method.type} needs no other task")


def _claim(run: LoadedRun, network: Network, condition: Any) -> Claim:
    """The data that a network claims, for a condition."""
    objective = run.objective

    def claim(x_BX: jax.Array, point: Point) -> jax.Array:
        output_BX = network(x_BX, objective, point, condition)
        return to_data(
            objective.prediction, output_BX, x_BX, point, sigma_data=objective.sigma_data
        )

    return claim


def _guided_claim(
    config: DiffusionTuneConfig, run: LoadedRun, network: Network, batch: Any, scale: float
) -> Claim:
    """The teacher's claim under guidance, without gradient."""
    objective, rows = run.objective, batch["example"].shape[0]
    condition = network.condition(batch)
    if scale == 1 or run.facts.prompts is None:
        return _claim(run, network, condition)
    empty = network.condition(text_arrays(run.facts.prompts, [""] * rows))
    call = guided(
        lambda x, point, condition: network(x, objective, point, condition), condition, empty, scale
    )

    def claim(x_BX: jax.Array, point: Point) -> jax.Array:
        found = to_data(
            objective.prediction,
            call(x_BX, point),
            x_BX,
            point,
            sigma_data=objective.sigma_data,
        )
        return jax.lax.stop_gradient(found)

    return claim


def _consistency(
    config: DiffusionTuneConfig,
    method: Consistency,
    run: LoadedRun,
    network: Learner,
    batch: Any,
    key: jax.Array,
) -> Loss:
    del key  # noise is of the example and the step
    data_BX = batch["images"]
    noise_BX, u_B = _draws(config, batch, data_BX.shape[1:])
    levels = solver_levels(run.objective.schedule(method.levels), u_B)
    student = _claim(run, network, network.condition(batch))
    teacher = _guided_claim(config, run, network.teacher, batch, method.guidance)
    loss_B = consistency_losses(student, teacher, data_BX, noise_BX, levels, huber=method.huber)
    return _sum(loss_B, batch["weight"])


def _dmd2(
    config: DiffusionTuneConfig,
    method: DMD2,
    run: LoadedRun,
    network: Learner,
    batch: Any,
    key: jax.Array,
) -> Loss:
    del key
    objective, other_network = run.objective, network.fake
    assert other_network is not None, "the run's model was made with one"
    shape = batch["images"].shape[1:]
    noise_BX, u_B = _draws(config, batch, shape)
    table = lcm(objective.schedule(method.steps))
    steps_B = jnp.minimum((u_B * method.steps).astype(jnp.int32), method.steps - 1)
    condition = network.condition(batch)
    student = _claim(run, network, condition)
    fresh = jax.vmap(
        lambda step, example: jax.random.fold_in(
            jax.random.fold_in(jax.random.key(config.seed + 1), step), example
        )
    )(batch["step"], batch["example"])
    x_BX, point = few_step_sample(student, noise_BX, table, fresh, steps_B)
    drawn_BX = jax.lax.stop_gradient(student(x_BX, point))
    other = {**batch, "example": batch["example"] + 2**30}
    noise_BX, u_B = _draws(config, other, shape)
    level = objective.point(u_B)
    fake_condition = other_network.condition(batch)

    def matching() -> jax.Array:
        real = _guided_claim(config, run, network.teacher, batch, method.guidance)
        fake = _claim(run, other_network, fake_condition)
        return matching_losses(student(x_BX, point), real, fake, noise_BX, level)

    # The student's turn: at other steps neither it nor the teacher is run for this.
    turn = batch["step"][0] % method.every == 0
    matching_B = jax.lax.cond(turn, matching, lambda: jnp.zeros(len(x_BX)))
    # The network of what is drawn denoises that.
    noised_BX = objective.noised(drawn_BX, noise_BX, level)
    output_BX = other_network(noised_BX, objective, level, fake_condition)
    denoising_B = objective.losses(output_BX, drawn_BX, noise_BX, level)
    found = _sum(matching_B + denoising_B, batch["weight"])
    metrics = {"denoising": (jnp.sum(denoising_B * batch["weight"]), found.weight)}
    return replace(found, metrics=jax.tree.map(jax.lax.stop_gradient, metrics))


def _draws(
    config: DiffusionTuneConfig, batch: Any, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Noise (B, *X) and spread uniform numbers (B,), of examples and steps."""
    noise_BX = example_noise(config.seed, batch["step"], batch["example"], shape)
    u_B = example_uniform(config.seed, batch["step"], batch["example"])
    if config.stratified:
        u_B = stratified(u_B, batch["place"] % config.batch_size, config.batch_size)
    return noise_BX, u_B


def _sum(loss_B: jax.Array, weight_B: jax.Array) -> Loss:
    return Loss(total=jnp.sum(loss_B * weight_B), weight=jnp.sum(weight_B), metrics={})


def _dpo(
    config: DiffusionTuneConfig,
    method: DPO,
    run: LoadedRun,
    network: Learner,
    batch: Any,
    key: jax.Array,
) -> Loss:
    """Both images of a pair with one noise at one level."""
    del key
    objective, images_P2X = run.objective, batch["images"]
    noise_PX, u_P = _draws(config, batch, images_P2X.shape[2:])
    point = objective.point(u_P)

    def errors(model: Network) -> jax.Array:
        found = []
        for side in range(2):
            data_PX = images_P2X[:, side]
            x_PX = objective.noised(data_PX, noise_PX, point)
            output_PX = model(x_PX, objective, point, model.condition(batch))
            found.append(objective.losses(output_PX, data_PX, noise_PX, point))
        return jnp.stack(found, 1)

    reference_P2 = jax.lax.stop_gradient(errors(network.teacher))
    loss_P, metrics = diffusion_dpo(errors(network), reference_P2, beta=method.beta)
    weight_P = batch["weight"]
    sums = {name: (jnp.sum(m * weight_P), jnp.sum(weight_P)) for name, m in metrics.items()}
    return replace(_sum(loss_P, weight_P), metrics=sums)


def _grpo(
    config: DiffusionTuneConfig,
    method: FlowGRPO,
    run: LoadedRun,
    network: Learner,
    batch: Any,
    key: jax.Array,
) -> Loss:
    """`preference.flow_grpo` of a batch of `Groups`."""
    del key
    objective = run.objective

    def under(model: Network) -> Callable[[jax.Array, Point], jax.Array]:
        condition = model.condition(batch)
        return lambda x_BX, point: model(x_BX, objective, point, condition)

    loss_B, metrics = flow_grpo(
        under(network),
        under(network.teacher) if method.kl else None,
        jnp.moveaxis(batch["path"], 1, 0),
        batch["logps"],
        batch["advantages"],
        ddim(objective.schedule(method.steps), method.eta),
        prediction=objective.prediction,
        sigma_data=objective.sigma_data,
        kl=method.kl,
    )
    weight_B = batch["weight"]
    sums = {name: (jnp.sum(m * weight_B), jnp.sum(weight_B)) for name, m in metrics.items()}
    return replace(_sum(loss_B, weight_B), metrics=jax.tree.map(jax.lax.stop_gradient, sums))
