"""Distillation: a student learns the teacher's distribution of every next token.

Legend: B rows, T tokens of a row, D student width, E teacher width, V vocabulary, K top tokens.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fornax.config.errors import ConfigError
from fornax.data import load_tokenizer
from fornax.kernels import linear_cross_entropy
from fornax.mesh import Rules, fit_mesh, make_mesh, named_sharding
from fornax.mesh import hosts as agreed
from fornax.models import Decoder, DecoderConfig, Remat, abstract_decoder
from fornax.train import load_decoder, model_config, tokenizer_folder
from fornax.train.hosts import find_hosts
from fornax.train.routing import with_routing
from fornax.train.task import Batch, Batches, Hosts, Loss, PostTraining, Task
from fornax.tune import losses
from fornax.tune.config import DistillConfig, TopLogits
from fornax.tune.data import (
    Encoded,
    ExtendedStream,
    Loaded,
    LoaderOptions,
    PackedStream,
    RowStream,
    load_examples,
    sft_batches,
)
from fornax.tune.data.tokenizer import check_same_tokens, shared_vocabulary
from fornax.tune.policy import Origin, Policy
from fornax.tune.policy import policy as policy_of
from fornax.tune.splits import described, load_splits, loader_options
from fornax.tune.stores import TopKey, TopStore, data_fingerprint, weights_fingerprint, write_top
from fornax.tune.tasks.student import Student, check_samplers
from fornax.tune.tasks.teacher import OnPolicyStream, Teacher, numbered_rows

__all__ = ["make"]


_HEAD = "teacher_head"


class FrozenParam(nnx.Param):
    """A parameter that is given, not trained: the teacher's output projection."""


@dataclass(kw_only=True)
class Distillation:
    """Teacher, student and data of one run; the teacher is loaded when it is first asked."""

    config: DistillConfig
    origin: Origin
    policy: Policy
    splits: Mapping[str, Loaded[Encoded]]
    out: Path
    teacher_config: DecoderConfig | None = None
    _teacher: Teacher | None = None
    _stores: dict[str, TopStore] = field(default_factory=dict)
    _drawn: OnPolicyStream | None = None
    _student: Student | None = None

    def __post_init__(self) -> None:
        path = self.config.teacher
        if path is None:
            return
        self.teacher_config = model_config(path)
        folder = tokenizer_folder(Path(path).expanduser())
        if folder is None:
            raise ConfigError(
                f"there is no tokenizer in teacher={path}, so nothing says that its tokens are the "
                "student's; put its tokenizer.json there"
            )
        tokenizer = self.origin.tokenizer
        names = {"names": ("teacher", path), "others": ("model", self.config.model)}
        check_same_tokens(load_tokenizer(folder), tokenizer, **names)
        outputs = self.origin.model_config.vocab_size
        shared_vocabulary(self.teacher_config.vocab_size, outputs, tokenizer.vocab_size)
        longest = self.teacher_config.max_position_embeddings
        if self.config.max_length > longest:
            raise ConfigError(
                f"max_length={self.config.max_length} is beyond the {longest} positions that "
                f"teacher={path} is made for; lower it"
            )

    @property
    def full_logits(self) -> bool:
        """Whether every logit counts."""
        return not isinstance(self.config.logits, TopLogits)

    @property
    def loss(self) -> Callable[..., Loss]:
        """`distill_loss` of this run's teacher."""
        teacher = self.teacher_config
        if not self.full_logits or teacher is None:
            return functools.partial(distill_loss, config=self.config)
        return functools.partial(
            distill_loss,
            config=self.config,
            vocabulary=min(teacher.vocab_size, self.origin.model_config.vocab_size),
            teacher_softcap=teacher.final_logit_softcap,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the log about the teacher."""
        if isinstance(self.config.logits, TopLogits):
            return (f"the teacher's top {self.config.logits.k} tokens are read from {self.store}",)
        return (f"the teacher is {self.config.teacher}",)

    @property
    def store(self) -> Path:
        """The folder of stored logits."""
        assert isinstance(self.config.logits, TopLogits)
        path = self.config.logits.path
        return Path(path).expanduser() if path else self.out / "teacher_logits"

    def build(self, rngs: nnx.Rngs) -> Decoder:
        """The student with fresh weights, and room for the teacher's projection."""
        student = self.policy.build(rngs)
        if self.full_logits and self.teacher_config is not None:
            shape = (self.teacher_config.hidden_size, self.teacher_config.vocab_size)
            head = jnp.zeros(shape, self.config.dtypes.compute_dtype)
            setattr(student, _HEAD, FrozenParam(head, axes=("embed", "vocab")))
        return student

    def pretrained(self, mesh: Mesh, rules: Rules) -> Decoder:
        """The student with its weights, and the teacher's projection, laid on the mesh."""
        student = self.policy.pretrained(mesh, rules)
        if self.full_logits:
            teacher = self.teacher(find_hosts(mesh, rules))
            head = teacher.output_weights().astype(self.config.dtypes.compute_dtype)
            axes = ("embed", "vocab")
            where = named_sharding(mesh, axes, rules, shape=head.shape, name="teacher_head")
            setattr(student, _HEAD, FrozenParam(jax.device_put(head, where), axes=axes))
        return student

    def teacher(self, hosts: Hosts) -> Teacher:
        """The teacher, laid on its mesh."""
        config = self.config
        if self._teacher is None:
            if config.teacher is None:
                raise ConfigError(
                    f"{self.store} does not hold this run's logits, and no teacher is named to "
                    "write them; name it with --teacher"
                )
            where = config.teacher_mesh or config.mesh
            shapes = abstract_decoder(self.teacher_config or model_config(config.teacher))
            mesh = make_mesh(fit_mesh(where, nnx.state(shapes), jax.device_count()))
            rules = where.resolved_rules()
            dtype = config.dtypes.compute_dtype  # nothing trains it: no higher precision is kept
            decoder = load_decoder(
                config.teacher, dtype=dtype, compute_dtype=dtype, mesh=mesh, rules=rules
            )
            self._teacher = Teacher(decoder, mesh=mesh, rules=rules, hosts=hosts)
        return self._teacher

    def steps_per_epoch(self) -> float:
        """Steps of one pass over the training examples."""
        stream = self._plain("train", loader_options(self.config, Hosts(), train=True))
        return float(stream.batches_in(1))

    def batches(self, split: str, hosts: Hosts) -> Batches:
        """`Task.batches`."""
        config = self.config
        stream: Batches = self._plain(split, loader_options(config, hosts, train=split == "train"))
        if isinstance(config.logits, TopLogits):
            return ExtendedStream(stream, self._stored(split, hosts).columns)
        if config.on_policy is not None and split == "train":
            self._student = Student(config, self.origin, lambda student: delattr(student, _HEAD))
            stream = self._drawn = OnPolicyStream(
                self._plain(split, loader_options(config, Hosts(), train=True)),
                self.splits[split].items,
                config.on_policy,
                max_length=config.max_length,
                seed=config.seed,
                hosts=hosts,
                student=self._student,
            )
        teacher = self.teacher(hosts)
        return ExtendedStream(stream, lambda rows: {"teacher_hidden": teacher.hidden(rows)})

    def _plain(self, split: str, options: LoaderOptions) -> PackedStream | RowStream:
        loaded = self.splits[split]
        if self.config.packs:
            return sft_batches(loaded, options, self.config.max_length)
        return numbered_rows(loaded, options, self.config.max_length)

    def _stored(self, split: str, hosts: Hosts) -> TopStore:
        """The stored logits of a split, written first if they are not there."""
        assert isinstance(self.config.logits, TopLogits)
        if split not in self._stores:
            path, items = self.store / split, self.splits[split].items
            named = self.config.teacher
            key = TopKey(
                data=data_fingerprint(a for item in items for a in (item.tokens, item.mask)),
                vocabulary=self.origin.tokenizer.vocab_size,
                k=self.config.logits.k,
                temperature=self.config.temperature,
                teacher=None if named is None else weights_fingerprint(named),
            )
            if not agreed.decide(lambda: TopStore.exists(path)):
                rows = self._plain(split, loader_options(self.config, hosts, train=False))
                top = functools.partial(
                    self.teacher(hosts).top,
                    k=key.k,
                    temperature=key.temperature,
                    vocabulary=key.vocabulary,
                )
                write_top(path, key, top, rows, [item.trained for item in items])
                self._teacher = None  # it is not asked again: give its memory back
            self._stores[split] = TopStore(path, key)
        return self._stores[split]

    def follow(self, step: int, model: Callable[[], nnx.Module]) -> None:
        """`Task.follow`: the student to draw from."""
        if self._drawn is not None and self._student is not None:
            self._drawn.step = step
            self._student.follow(step, model)

    def observe(self) -> dict[str, float]:
        """`Task.observe`: whether the rows just taken were drawn."""
        return {"on_policy": float(self._drawn is not None and self._drawn.drawn)}


def distill_loss(
    model: Decoder,
    batch: Batch,
    *,
    config: DistillConfig,
    vocabulary: int | None = None,
    teacher_softcap: float | None = None,
    remat: str | Remat = "none",
    hard: bool = False,
) -> Loss:
    """Sums over trained tokens; logits [B, T, V] of neither model ever exist full_logits.

    Args:
      model: the student; with full logits it has the teacher's projection as `teacher_head` [E, V].
      batch: tokens, targets, segment_ids, positions int32, loss_weights float32 [B, T]; and either
        teacher_hidden [B, T, E] or teacher_ids int32, teacher_logprobs float32 [B, T, K].
      config: divergence, temperature, weights.
      vocabulary: outputs that both models have, of full logits.
      teacher_softcap: the teacher's cap of logits.
      remat: what the backward pass computes again.
      hard: whether to report the cross entropy of the data although it has no weight.

    Returns:
      The weight counts tokens. Metrics: `divergence`, `agreement` (both models
      like the same token best), and with `hard` or a `hard_weight`
      `cross_entropy` and `accuracy` on the data's tokens.
    """
    x_BTD, routing = model.hidden_and_routing(
        batch["tokens"], batch["positions"], batch["segment_ids"], consecutive=True, remat=remat
    )
    w_DV = model.output_weights().astype(x_BTD.dtype)
    weights_BT = batch["loss_weights"]
    softcap = model.config.final_logit_softcap
    if isinstance(config.logits, TopLogits):
        sums = losses.linear_topk_distillation(
            x_BTD,
            w_DV,
            batch["teacher_ids"],
            batch["teacher_logprobs"],
            weights_BT,
            divergence=config.divergence,
            beta=config.beta,
            temperature=config.temperature,
            tail=config.logits.tail,
            softcap=softcap,
        )
    else:
        sums = losses.linear_distillation(
            x_BTD,
            w_DV,
            batch["teacher_hidden"],
            getattr(model, _HEAD).get_value(),
            weights_BT,
            divergence=config.divergence,
            beta=config.beta,
            temperature=config.temperature,
            softcap=softcap,
            teacher_softcap=teacher_softcap,
            vocabulary=vocabulary,
        )
    weight = sums.weight_sum
    total = sums.loss_sum
    metrics = {
        "divergence": (jax.lax.stop_gradient(total), weight),
        "agreement": (sums.agreement_sum, weight),
    }
    if hard or config.hard_weight:
        with jax.named_scope("loss"):
            data = linear_cross_entropy(x_BTD, w_DV, batch["targets"], weights_BT, softcap=softcap)
        metrics["cross_entropy"] = (jax.lax.stop_gradient(data.loss_sum), weight)
        metrics["accuracy"] = (data.correct_sum, weight)
        if config.hard_weight:
            total = total + config.hard_weight * data.loss_sum
    loss = Loss(total=total, weight=weight, metrics=metrics)
    return with_routing(loss, model, routing, balance=False)


def make(config: DistillConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune distill`; its data is read and checked here.

    Raises:
      DataError: with file and line of examples that cannot be used.
      ConfigError: when the teacher's vocabulary is another, adapters fit nothing, or samplers
        would draw nothing.
      ClusterError: with `on_policy` in several processes without samplers.
    """
    check_samplers(config)
    load = functools.partial(load_examples, full=config.loss_on == "all")
    splits = load_splits(config, origin, load)
    policy = policy_of(config, origin)
    distillation = Distillation(config=config, origin=origin, policy=policy, splits=splits, out=out)
    remat, loss = config.resolved_remat(), distillation.loss
    return Task(
        build=distillation.build,
        pretrained=distillation.pretrained,
        loss=lambda model, batch, key: loss(model, batch, remat=remat),
        evaluate=lambda model, batch: loss(model, batch, hard=True),
        batches=distillation.batches,
        summarise=_summarise,
        unit="trained_tokens",
        post=PostTraining(
            trained=nnx.All(policy.trained, nnx.Not(FrozenParam)),
            follow=None if config.on_policy is None else distillation.follow,
            observe=None if config.on_policy is None else distillation.observe,
            steps_per_epoch=distillation.steps_per_epoch(),
            notes=(policy.text, *distillation.notes, *described(splits)),
        ),
    )


def _summarise(means: dict[str, float]) -> dict[str, float]:
    return {**means, "perplexity": math.exp(min(means["cross_entropy"], 700.0))}
