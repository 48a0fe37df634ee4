"""A reward model: a decoder with a scalar head, which scores completions of prompts.

Legend: N sequences, T tokens of a row, D model width, P pairs.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import safe_open
from safetensors.numpy import save_file

from fornax import adapters, optim
from fornax.checkpoint import Checkpointer
from fornax.config import from_yaml
from fornax.config.errors import ConfigError
from fornax.mesh import DEFAULT_RULES, MeshConfig, Rules, make_mesh, use_mesh
from fornax.models import Decoder, Remat, save_pretrained
from fornax.train.run_dir import RunDirectory
from fornax.train.state import split_model
from fornax.train.task import Batch
from fornax.tune.config import RewardModelConfig
from fornax.tune.data import Codec, Encoded, bucket, buckets_up_to, pad_rows
from fornax.tune.data.records import Messages
from fornax.tune.policy import ModelOrigin, Policy, read_origin
from fornax.tune.policy import policy as policy_of
from fornax.tune.splits import codec_of

__all__ = ["RewardModel", "load_reward_model", "save_sequence_classifier", "scored", "scores"]


_NAME = "reward_head"


class HeadParam(nnx.Param):
    """The parameter of a scalar head."""


def scored(config: RewardModelConfig, origin: ModelOrigin) -> Policy:
    """The model that `config` trains: a policy with a `reward_head` [D].

    Raises:
      ConfigError: when a pattern of `config.lora` matches no module.
    """
    policy = policy_of(config, origin)
    width = origin.model_config.hidden_size

    def with_head(decoder: Decoder, rngs: nnx.Rngs) -> Decoder:
        # Scores of about unit size: the final norm's output has D entries of about that.
        head = jax.random.normal(rngs.params(), (width,), jnp.float32) / (width + 1) ** 0.5
        setattr(decoder, _NAME, HeadParam(head, axes=("embed",)))
        return decoder

    def build(rngs: nnx.Rngs) -> Decoder:
        return with_head(policy.build(rngs), rngs)

    def pretrained(mesh: Mesh, rules: Rules) -> Decoder:
        return with_head(policy.pretrained(mesh, rules), nnx.Rngs(config.seed))

    # A score reads no logits: the output projection would get no gradient.
    body = nnx.All(policy.trained, nnx.Not(nnx.PathContains("lm_head")))
    of_body = policy.trained_parameters
    if config.lora is None and not origin.model_config.tie_embeddings:
        of_body -= width * origin.model_config.vocab_size
    if config.train_head_only:
        body, of_body = nnx.Nothing(), 0
    return dataclasses.replace(
        policy,
        build=build,
        pretrained=pretrained,
        trained=nnx.Any(body, HeadParam),
        parameters=policy.parameters + width,
        trained_parameters=width + of_body,
    )


def reward_head(model: Decoder) -> HeadParam:
    """The scalar head of a model of `scored`, [D]."""
    return getattr(model, _NAME)


def scores(model: Decoder, batch: Batch, *, remat: str | Remat = "none") -> jax.Array:
    """The score of each sequence, read at its last token that is not padding.

    Args:
      model: a decoder with a `reward_head` [D].
      batch: tokens, positions, segment_ids int32 [..., T]; segment 0 is padding.
      remat: what the backward pass computes again.

    Returns:
      float32 [...].
    """
    shape = batch["tokens"].shape[:-1]

    def flat(name: str) -> jax.Array:
        return batch[name].reshape(-1, batch[name].shape[-1])

    segment_ids_NT = flat("segment_ids")
    x_NTD = model.hidden(
        flat("tokens"), flat("positions"), segment_ids_NT, consecutive=True, remat=remat
    )
    places_T = jnp.arange(segment_ids_NT.shape[-1])
    last_N = jnp.max(jnp.where(segment_ids_NT > 0, places_T, 0), axis=-1)
    x_ND = jnp.take_along_axis(x_NTD, last_N[:, None, None], axis=1)[:, 0]
    head_D = reward_head(model).get_value().astype(jnp.float32)
    return (x_ND.astype(jnp.float32) @ head_D).reshape(shape)


@dataclass(kw_only=True)
class RewardModel:
    """A decoder with a scalar head, and what encodes for it.

    Example:
      >>> scorer = load_reward_model("runs/reward")
      >>> scorer.score(["2 + 2 ="], [" 4"])
    """

    model: Decoder
    codec: Codec
    max_length: int
    mesh: Mesh
    rules: Rules
    tokenizer_path: Path
    batch_size: int = 8
    """Sequences scored at once."""

    def __post_init__(self) -> None:
        self._graphdef, self._state = nnx.split(self.model)
        self._run = jax.jit(self._compute)

    def score(
        self, prompts: Sequence[str | Messages], completions: Sequence[str | Messages]
    ) -> np.ndarray:
        """The score of each completion of its prompt, float32 [N]: higher is better.

        Args:
          prompts: texts, or lists of messages.
          completions: texts, or lists of messages, alike.

        Raises:
          ConfigError: when prompt and completion are longer than the model was trained for.
        """
        encoded = [
            self.codec.completion(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return self.score_encoded(encoded)

    def score_encoded(self, sequences: Sequence[Encoded]) -> np.ndarray:
        """The score of each sequence of tokens, float32 [N]."""
        longest = max((s.length for s in sequences), default=0)
        if longest > self.max_length:
            raise ConfigError(
                f"a prompt and its completion have {longest} tokens, and the reward model was "
                f"trained on max_length={self.max_length}; shorten them, or train it on longer ones"
            )
        found = np.zeros(len(sequences), np.float32)
        order = np.argsort([s.length for s in sequences], kind="stable").tolist()
        for batch in _blocks(order, self.batch_size):
            rows: list[Encoded | None] = [sequences[n] for n in batch]
            rows += [None] * (self.batch_size - len(batch))
            length = bucket(sequences[batch[-1]].length, buckets_up_to(self.max_length))
            values = jax.device_get(self._run(self._state, pad_rows(rows, length)))
            found[batch] = values[: len(batch)]
        return found

    def _compute(self, state: nnx.State, batch: Mapping[str, jax.Array]) -> jax.Array:
        with use_mesh(self.mesh, self.rules):
            return scores(nnx.merge(self._graphdef, state), batch)


def _blocks(order: list[int], size: int) -> Iterator[list[int]]:
    return (order[at : at + size] for at in range(0, len(order), size))


def load_reward_model(
    path: str | Path,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> RewardModel:
    """The reward model of a run of `fornax tune reward`, from its latest checkpoint.

    Args:
      path: the run directory.
      devices: where it lies; None takes the first device.

    Raises:
      ConfigError: when `path` is no such run.
      CheckpointError: for weights that are missing or damaged.
    """
    checkpointer = Checkpointer(RunDirectory(path).checkpoints)
    if checkpointer.latest_step() is None:
        raise ConfigError(
            f"{path} is not a run directory with checkpoints; name one of `fornax tune reward`"
        )
    text = checkpointer.read_config()
    if "train_head_only:" not in text:
        raise ConfigError(
            f"{path} is not a run of `fornax tune reward`: its model has no reward head"
        )
    config = from_yaml(RewardModelConfig, text, source=f"the config saved in {path}")
    origin = read_origin(config)
    policy = scored(config, origin)
    chosen = jax.devices()[:1] if devices is None else devices
    mesh, rules = make_mesh(MeshConfig(), chosen), DEFAULT_RULES
    parts = split_model(policy.pretrained(mesh, rules), policy.trained)
    wanted: dict[str, object] = {"params": nnx.to_pure_dict(parts.params)}
    chain = None
    if config.optim.ema is not None or config.optim.lookahead is not None:
        assert config.steps is not None
        chain = optim.build(config.optim, total_steps=config.steps, params=parts.params)
        wanted["optimizer"] = jax.eval_shape(chain.init, wanted["params"])
    restored = checkpointer.restore(jax.tree.map(_abstract, wanted), partial=True)
    params = restored.state["params"]
    if chain is not None:
        params = chain.eval_params(params, restored.state["optimizer"])
    model = parts.merge(params, nnx.to_pure_dict(parts.other), jax.random.key(0))
    model.eval()
    return RewardModel(
        model=model,
        codec=codec_of(config, origin),
        max_length=config.max_length,
        mesh=mesh,
        rules=rules,
        tokenizer_path=origin.tokenizer_path,
    )


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def save_sequence_classifier(scorer: RewardModel, path: str | Path) -> None:
    """Write a Hugging Face directory that transformers loads for sequence classification.

    Adapters are merged. Its one output is the score, `score.weight` [1, D].

    Raises:
      ConfigError: when no Hugging Face family can express the decoder.
      CheckpointError: when the directory exists or cannot be written.
    """
    target = Path(path)
    decoder: Decoder = adapters.merged(scorer.model)
    head = np.asarray(reward_head(decoder).get_value(), np.float32)
    delattr(decoder, _NAME)
    decoder.lm_head = None  # the score takes its place
    decoder.config = dataclasses.replace(decoder.config, tie_embeddings=True)
    save_pretrained(decoder, target, scorer.tokenizer_path)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]
    ]
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if config.get("pad_token_id") is None:
        # It reads the last token that is not this one; an end token would be passed over.
        config["pad_token_id"] = scorer.codec.tokenizer.pad_id
    _add_tensor(target, "score.weight", head[None].astype(decoder.embed.embedding[...].dtype))
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _add_tensor(folder: Path, name: str, value: np.ndarray) -> None:
    """One more tensor, in a file of its own, and an index over all files."""
    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():
        index = json.loads(index_file.read_text(encoding="utf-8"))
        places = index["weight_map"]
    else:
        first = "model-00001-of-00002.safetensors"
        (folder / "model.safetensors").rename(folder / first)
        with safe_open(folder / first, framework="numpy") as stored:
            places = dict.fromkeys(stored.keys(), first)
    save_file({name: value}, folder / "score.safetensors", metadata={"format": "pt"})
    places[name] = "score.safetensors"
    size = sum((folder / file).stat().st_size for file in set(places.values()))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    index_file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
