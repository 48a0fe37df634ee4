"""Reading a config.json so that every key is understood, known to be harmless, or an error."""

from collections.abc import Mapping, Sequence
from typing import Any

from fornax.config.errors import ConfigError

__all__ = ["ConfigReader"]

_HARMLESS = frozenset(
    {
        # where the file came from, and how its makers loaded it
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "_attn_implementation_autoset",
        "_commit_hash",
        "name_or_path",
        "is_llama_config",
        "transformers.js_config",
        "use_bfloat16",
        "pretraining_tp",
        "unsloth_version",
        "unsloth_fixed",
        # caches and outputs of the library that wrote it
        "cache_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_legacy_cache",
        "torchscript",
        "use_cache",
        # labels and generation defaults that older versions wrote into config.json
        "bad_words_ids",
        "begin_suppress_tokens",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_scores",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "typical_p",
    }
)
"""Keys that do not change what a model computes."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "attention_dropout": (0, 0.0, None),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
}
"""Keys that may be present with these values only."""

_REQUIRED = object()


class ConfigReader:
    """The keys of one config.json, each to be taken once."""

    def __init__(self, values: Mapping[str, object], source: str = "config.json"):
        """Read from `values`; `source` names them in errors."""
        self._values = dict(values)
        self._left = set(values) - _HARMLESS
        self.source = source

    def __contains__(self, key: str) -> bool:
        """Whether the key is present."""
        return key in self._values

    def take(self, key: str, default: object = _REQUIRED) -> Any:
        """The value of `key`.

        Raises:
          ConfigError: when it is missing and there is no default.
        """
        self._left.discard(key)
        if key in self._values:
            return self._values[key]
        if default is _REQUIRED:
            raise ConfigError(f"{self.source} has no {key!r}, which this architecture needs")
        return default

    def expect(self, key: str, *allowed: object) -> None:
        """Accept `key` when it is absent or has one of the values.

        Raises:
          ConfigError: for another value.
        """
        self._left.discard(key)
        if key in self._values and self._values[key] not in allowed:
            shown = " or ".join(repr(value) for value in allowed)
            raise ConfigError(
                f"{self.source}: {key}={self._values[key]!r} is not supported; only {shown} is"
            )

    def choose(self, key: str, table: Mapping[str, object], default: object = _REQUIRED) -> Any:
        """The entry of `table` that `key` names.

        Raises:
          ConfigError: for a value that is not in the table.
        """
        value = self.take(key, default)
        if not isinstance(value, str) or value not in table:
            raise ConfigError(
                f"{self.source}: {key}={value!r} is not supported; use one of {', '.join(table)}"
            )
        return table[value]

    def nested(self, key: str, value: object) -> "ConfigReader":
        """A reader of the mapping `value` found under `key`.

        Raises:
          ConfigError: when it is not a mapping.
        """
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.source}: {key}={value!r} must be a mapping")
        return ConfigReader(value, f"{self.source}: {key}")

    def finish(self) -> None:
        """Check that nothing was left unread.

        Raises:
          ConfigError: naming the keys that Fornax does not know.
        """
        for key in sorted(self._left & set(_NEUTRAL)):
            self.expect(key, *_NEUTRAL[key])
        if self._left:
            shown = ", ".join(f"{key}={self._values[key]!r}" for key in sorted(self._left))
            raise ConfigError(
                f"{self.source} sets {shown}, which is not supported for this architecture; remove "
                "it only if you know that the model computes the same without it"
            )


def as_list(value: object, key: str, reader: ConfigReader, length: int) -> Sequence[Any]:
    """`value` as a list of at least `length` entries, cut to it.

    Raises:
      ConfigError: when it is not one.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < length:
        raise ConfigError(
            f"{reader.source}: {key}={value!r} must be a list with one entry for each of the "
            f"{length} layers"
        )
    return value[:length]
