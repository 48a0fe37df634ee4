"""Random Llamas and Qwen3-MoEs as Hugging Face directories, for benchmarks that need no text.

The weights are drawn from a seed and the tokenizer is trained on the standard library's source, so
every machine makes the same model. The output layer is drawn wide enough that the likeliest token
stands clear of the next one: contestants of one precision can be checked for equal greedy tokens.
"""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SOURCES = 400
"""Files of the standard library that the tokenizer is trained on."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a Llama."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    vocab: int = 8192
    context: int = 4096

    @property
    def weights(self) -> int:
        """All parameters but the input embedding."""
        return self.parameters - self.vocab * self.width

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(int(np.prod(shape)) for shape in self.tensors().values())

    @property
    def active(self) -> int:
        """Parameters that one token runs through, its row of the embedding's table aside."""
        return self.weights

    def flops(self, length: float) -> float:
        """Operations of one token that attends to `length` tokens."""
        return 2 * self.active + 4 * self.layers * self.heads * self.head_dim * length

    def read(self, touched: float) -> float:
        """Parameters that a step reads; `touched` is the share of experts that its tokens chose."""
        del touched
        return self.weights

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm.weight": (self.width,),
            "self_attn.q_proj.weight": (queries, self.width),
            "self_attn.k_proj.weight": (keys, self.width),
            "self_attn.v_proj.weight": (keys, self.width),
            "self_attn.o_proj.weight": (self.width, queries),
            "post_attention_layernorm.weight": (self.width,),
            "mlp.gate_proj.weight": (self.hidden, self.width),
            "mlp.up_proj.weight": (self.hidden, self.width),
            "mlp.down_proj.weight": (self.width, self.hidden),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes as Hugging Face has them."""
        layer = self.layer()
        return {
            "model.embed_tokens.weight": (self.vocab, self.width),
            **{
                f"model.layers.{number}.{name}": shape
                for number in range(self.layers)
                for name, shape in layer.items()
            },
            "model.norm.weight": (self.width,),
            "lm_head.weight": (self.vocab, self.width),
        }

    def config(self) -> dict[str, object]:
        """The contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            "initializer_range": 0.02,
            "torch_dtype": "float32",
            "dtype": "float32",
        }

    def __str__(self) -> str:
        return (
            f"random Llama of {self.parameters / 1e6:.1f}M parameters, {self.layers} layers, width "
            f"{self.width}, {self.heads} heads, {self.kv_heads} key-value heads, vocabulary "
            f"{self.vocab}"
        )


@dataclass(frozen=True, kw_only=True)
class MoeShape(Shape):
    """The sizes of a Qwen3-MoE; `hidden` is the width of one expert."""

    experts: int
    experts_per_token: int

    @property
    def expert_weights(self) -> int:
        """Parameters of all experts of all layers."""
        return self.layers * self.experts * 3 * self.width * self.hidden

    @property
    def active(self) -> int:
        """Parameters that one token runs through, its row of the embedding's table aside."""
        return round(self.read(self.experts_per_token / self.experts))

    def read(self, touched: float) -> float:
        """Parameters that a step reads; `touched` is the share of experts that its tokens chose."""
        return self.weights - (1 - touched) * self.expert_weights

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of one layer."""
        dense = {name: shape for name, shape in super().layer().items() if "mlp" not in name}
        into, back = (self.hidden, self.width), (self.width, self.hidden)
        return {
            **dense,
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate.weight": (self.experts, self.width),
            **{
                f"mlp.experts.{expert}.{name}.weight": shape
                for expert in range(self.experts)
                for name, shape in {"gate_proj": into, "up_proj": into, "down_proj": back}.items()
            },
        }

    def config(self) -> dict[str, object]:
        """The contents of config.json."""
        llama = {name: value for name, value in super().config().items() if name != "mlp_bias"}
        return {
            **llama,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.hidden,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }

    def __str__(self) -> str:
        return (
            f"random Qwen3-MoE of {self.parameters / 1e6:.0f}M parameters, of which a token runs "
            f"through {self.active / 1e6:.0f}M; {self.layers} layers, width {self.width}, "
            f"{self.heads} heads, {self.kv_heads} key-value heads, {self.experts} experts of width "
            f"{self.hidden}, {self.experts_per_token} a token, vocabulary {self.vocab}"
        )


SHAPES = {
    "tiny": Shape(layers=2, width=128, hidden=256, heads=2, kv_heads=1, vocab=1024),
    "llama-40m": Shape(layers=8, width=512, hidden=2048, heads=8, kv_heads=4),
    "llama-300m": Shape(layers=18, width=1024, hidden=4096, heads=16, kv_heads=8),
    "qwen3-moe-tiny": MoeShape(
        layers=2,
        width=64,
        hidden=32,
        heads=2,
        kv_heads=1,
        vocab=1024,
        experts=8,
        experts_per_token=2,
    ),
    "qwen3-moe-20m": MoeShape(  # that of recipes/stdlib-moe.yaml, with an output layer of its own
        layers=5,
        width=192,
        hidden=128,
        heads=6,
        kv_heads=3,
        head_dim=32,
        vocab=4096,
        experts=48,
        experts_per_token=4,
    ),
    "qwen3-moe-90m": MoeShape(
        layers=4, width=512, hidden=192, heads=8, kv_heads=4, experts=64, experts_per_token=8
    ),
    "qwen3-moe-200m": MoeShape(
        layers=8, width=512, hidden=320, heads=8, kv_heads=4, experts=48, experts_per_token=4
    ),
}


def make(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the model `name` of SHAPES below `folder`, unless it is there; return its directory."""
    path, shape = folder / name, SHAPES[name]
    if (path / "complete").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    save_file(_weights(shape, seed), path / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(shape.vocab).save(str(path / "tokenizer.json"))
    files = {
        "config.json": shape.config(),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "pad_token": "<|end|>",
            "model_max_length": shape.context,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for file, content in files.items():
        (path / file).write_text(json.dumps(content, indent=2) + "\n")
    (path / "complete").touch()
    return path


def _weights(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, sizes in shape.tensors().items():
        if len(sizes) == 1:
            weights[name] = np.ones(sizes, np.float32)
            continue
        scale = 1.0 if name.startswith("model.embed") else sizes[1] ** -0.5
        weights[name] = rng.standard_normal(sizes, np.float32) * np.float32(scale)
    return weights


def _tokenizer(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    missing = vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|unused{number}|>" for number in range(missing)])
    return tokenizer


def _text() -> Iterator[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for file in files[:SOURCES]:
        yield file.read_text(encoding="utf-8", errors="replace")


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Draw prompts of equal length that share no prefix."""
    rng = np.random.default_rng(seed)
    return rng.integers(2, vocab, (count, length)).tolist()
