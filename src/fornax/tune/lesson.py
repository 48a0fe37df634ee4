"""What a distillation run is made of: teacher, student, and rows that join them.

Legend: B rows, E teacher width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fornax import adapters
from fornax.config.errors import ConfigError
from fornax.data import load_tokenizer
from fornax.llm import EngineConfig
from fornax.mesh import Rules, make_mesh, named_sharding
from fornax.mesh import hosts as agreed
from fornax.models import DecoderConfig
from fornax.train import load_decoder, model_config, tokenizer_folder
from fornax.train.hosts import find_hosts
from fornax.train.task import Batches, Hosts
from fornax.tune.configs.distill import DistillConfig, TopLogits
from fornax.tune.data import Encoded, Feed, Loaded, sft_batches
from fornax.tune.distill_rows import Completed, Drawn, numbered_rows
from fornax.tune.policy import Origin, Policy
from fornax.tune.reference import data_fingerprint, weights_fingerprint
from fornax.tune.rollout import LLMSampler, Sampler
from fornax.tune.splits import feed_of
from fornax.tune.teacher import Teacher
from fornax.tune.teacher_store import TopKey, TopStore, write_top
from fornax.tune.tokens import check_same_tokens, shared_vocabulary

__all__ = ["FrozenParam", "Lesson"]


class FrozenParam(nnx.Param):
    """A parameter that is given, not trained: the teacher's output projection."""


@dataclass(kw_only=True)
class Lesson:
    """Teacher, student and data of one run; the teacher is loaded when it is first asked."""

    config: DistillConfig
    origin: Origin
    policy: Policy
    splits: Mapping[str, Loaded[Encoded]]
    out: Path
    teacher_config: DecoderConfig | None = None
    _teacher: Teacher | None = None
    _stores: dict[str, TopStore] = field(default_factory=dict)
    _drawn: Drawn | None = None
    _model: Callable[[], nnx.Module] | None = None
    _sampler: LLMSampler | None = None
    _version: int = 0

    def __post_init__(self) -> None:
        """Check the teacher's vocabulary, before any weights are read."""
        path = self.config.teacher
        if path is None:
            return
        self.teacher_config = model_config(path)
        folder = tokenizer_folder(Path(path).expanduser())
        if folder is None:
            raise ConfigError(
                f"no tokenizer lies with teacher={path}, so nothing says that its tokens are the "
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
    def whole(self) -> bool:
        """Whether every logit counts."""
        return not isinstance(self.config.logits, TopLogits)

    @property
    def compared(self) -> dict[str, Any]:
        """What `distill_loss` must know of the teacher."""
        if not self.whole or self.teacher_config is None:
            return {}
        student = self.origin.model_config.vocab_size
        return {
            "vocabulary": min(self.teacher_config.vocab_size, student),
            "teacher_softcap": self.teacher_config.final_logit_softcap,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What the log says of the teacher."""
        if isinstance(self.config.logits, TopLogits):
            return (f"the teacher's top {self.config.logits.k} tokens are read from {self.store}",)
        return (f"the teacher is {self.config.teacher}",)

    @property
    def store(self) -> Path:
        """The folder of stored logits."""
        assert isinstance(self.config.logits, TopLogits)
        path = self.config.logits.path
        return Path(path).expanduser() if path else self.out / "teacher_logits"

    def build(self, rngs: nnx.Rngs) -> Any:
        """The student with fresh weights, and room for the teacher's projection."""
        student = self.policy.build(rngs)
        if self.whole and self.teacher_config is not None:
            shape = (self.teacher_config.hidden_size, self.teacher_config.vocab_size)
            head = jnp.zeros(shape, self.config.dtypes.compute_dtype)
            student.teacher_head = FrozenParam(head, axes=("embed", "vocab"))
        return student

    def pretrained(self, mesh: Mesh, rules: Rules) -> Any:
        """The student with its weights, and the teacher's projection, laid on the mesh."""
        student = self.policy.pretrained(mesh, rules)
        if self.whole:
            teacher = self.teacher(find_hosts(self.config.batch_size, mesh, rules))
            head = teacher.output_weights().astype(self.config.dtypes.compute_dtype)
            axes = ("embed", "vocab")
            where = named_sharding(mesh, axes, rules, shape=head.shape, name="teacher_head")
            student.teacher_head = FrozenParam(jax.device_put(head, where), axes=axes)
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
            mesh, rules = make_mesh(where), where.resolved_rules()
            dtype = config.dtypes.compute_dtype  # nothing trains it: no higher precision is kept
            decoder = load_decoder(
                config.teacher, dtype=dtype, compute_dtype=dtype, mesh=mesh, rules=rules
            )
            self._teacher = Teacher(decoder, mesh=mesh, rules=rules, hosts=hosts)
        return self._teacher

    def steps_per_epoch(self) -> float:
        """Steps of one pass over the training examples."""
        stream = self._plain("train", feed_of(self.config, Hosts(), train=True))
        return float(stream.batches_per_epoch())

    def batches(self, split: str, hosts: Hosts) -> Batches:
        """`Task.batches`."""
        config = self.config
        stream: Any = self._plain(split, feed_of(config, hosts, train=split == "train"))
        if isinstance(config.logits, TopLogits):
            return Completed(stream, self._stored(split, hosts).columns)
        if config.on_policy is not None and split == "train":
            if hosts.count > 1:
                raise ConfigError("on_policy draws in one process; run it on one host")
            stream = self._drawn = Drawn(
                stream,
                self.splits[split].items,
                config.on_policy,
                max_length=config.max_length,
                seed=config.seed,
                sampler=self._student,
            )
        teacher = self.teacher(hosts)
        return Completed(stream, lambda rows: {"teacher_hidden": teacher.hidden(rows)})

    def _plain(self, split: str, feed: Feed) -> Any:
        loaded = self.splits[split]
        if self.config.packs:
            return sft_batches(loaded, feed, self.config.max_length)
        return numbered_rows(loaded, feed, self.config.max_length)

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
                rows = self._plain(split, feed_of(self.config, hosts, train=False))
                write_top(path, key, self.teacher(hosts), rows, [item.trained for item in items])
                self._teacher = None  # it is not asked again: give its memory back
            self._stores[split] = TopStore(path, key)
        return self._stores[split]

    def follow(self, step: int, model: Callable[[], nnx.Module]) -> None:
        """`Task.follow`: the student to draw from."""
        self._version, self._model = step, model
        if self._drawn is not None:
            self._drawn.step = step

    def observe(self) -> dict[str, float]:
        """`Task.observe`: whether the rows just taken were drawn."""
        return {"on_policy": float(self._drawn is not None and self._drawn.drawn)}

    def _student(self) -> Sampler:
        """A sampler with the student's weights of now."""
        assert self._model is not None
        assert self.config.on_policy is not None
        student: Any = adapters.merged(self._model())
        del student.teacher_head
        if self._sampler is None:
            engine = EngineConfig(
                max_model_len=self.config.max_length,
                max_num_seqs=min(self.config.batch_size, 64),
                step_sizes="coarse",
            )
            graphdef, state = nnx.split(student)  # the engine is made for one device
            state = jax.device_put(state, jax.local_devices()[0])
            self._sampler = LLMSampler(
                nnx.merge(graphdef, state),
                tokenizer=self.origin.tokenizer,
                eos_ids=self.origin.eos_ids,
                engine=engine,
            )
        self._sampler.update(nnx.state(student), self._version)
        return self._sampler
