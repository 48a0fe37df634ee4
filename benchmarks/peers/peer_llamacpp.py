"""Contestant: llama.cpp through the C functions of llama-cpp-python, one `llama_decode` a step."""

import ctypes
import json
from pathlib import Path

import numpy as np
from _protocol import GGUF_FILES, Record, converted, serve

CHUNK = 512
"""Prompt tokens of one llama_decode: llama.cpp's own default for a physical batch."""


class LlamaCpp:
    """A GGUF model; each shape gets a new context."""

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        import llama_cpp

        self._llama, self._threads, self._context = llama_cpp, threads, None
        folder = converted(model, f"gguf-{precision}", lambda path: write(model, path, precision))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(
            str(folder / "model.gguf").encode(), params
        )
        self._vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        self._cache = llama_cpp.GGML_TYPE_F32 if precision == "float32" else llama_cpp.GGML_TYPE_F16
        system = llama_cpp.llama_print_system_info().decode()
        features = [
            word.split(" = ")[0].split(": ")[-1] for word in system.split(" | ") if "= 1" in word
        ]
        self.details = {
            "versions": f"llama-cpp-python {llama_cpp.__version__}",
            "weights": {"int8": "q8_0", "int4": "q4_0"}.get(precision, precision.lower()),
            "cache": "float32" if precision == "float32" else "float16",
            "built with": " ".join(features),
        }

    def release(self) -> None:
        if self._context is not None:
            self._llama.llama_free(self._context)
        self._context = None

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self.release()
        llama = self._llama
        params = llama.llama_context_default_params()
        params.n_seq_max = batch
        params.n_ctx = batch * (-(-(prompt + new) // 256) * 256)
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._cache
        self._context = llama.llama_init_from_model(self._model, params)
        self._batch = llama.llama_batch_init(CHUNK, 0, 1)
        self.turn([[2] * min(prompt, 128)] * batch, 2, Record(batch))

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        memory = self._llama.llama_get_memory(self._context)
        self._llama.llama_memory_clear(memory, True)
        waiting = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: list[int] = [0] * len(prompts)
        for start in range(0, len(waiting), CHUNK):
            for row, token in self._decode(waiting[start : start + CHUNK]).items():
                last[row] = token
                record.token(row, token)
        length = len(prompts[0])
        for step in range(new - 1):
            entries = [(token, length + step, row, True) for row, token in enumerate(last)]
            last = list(self._decode(entries).values())
            record.step(last)

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token, position, row, wanted) through the model; return the next token of rows."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, row, wanted) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = wanted
        code = self._llama.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return {
            row: self._likeliest(index)
            for index, (_, _, row, wanted) in enumerate(entries)
            if wanted
        }

    def _likeliest(self, index: int) -> int:
        address = self._llama.llama_get_logits_ith(self._context, index)
        row = ctypes.cast(address, ctypes.POINTER(ctypes.c_float * self._vocab)).contents
        return int(np.frombuffer(row, np.float32).argmax())


def write(model: Path, folder: Path, precision: str) -> None:
    """Write the Llama or Qwen3-MoE of a Hugging Face directory as GGUF; what llama.cpp's own
    quantizer mixes, such as Q4_K_M, by that."""
    import gguf

    if precision in GGUF_FILES:
        floats = converted(model, "gguf-float32", lambda path: write(model, path, "float32"))
        quantize(floats, folder, precision)
        return
    config = json.loads((model / "config.json").read_text())
    kind = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}[precision]
    quantized = getattr(gguf.GGMLQuantizationType, kind)
    experts = config["model_type"] == "qwen3_moe"
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe" if experts else "llama")
    if experts:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(
        getattr(gguf.LlamaFileType, {"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}"))
    )
    add_tokenizer(writer, model, config["vocab_size"])
    for name, array in tensors(model, config):
        matrix = array.ndim > 1 and not name.endswith("ffn_gate_inp.weight")
        data = gguf.quants.quantize(array, quantized) if matrix else array
        writer.add_tensor(name, data, raw_dtype=quantized if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, folder: Path, kind: str) -> None:
    """Quantize the model.gguf of one folder into another, as `llama-quantize` does."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    names = (str(path / "model.gguf").encode() for path in (source, folder))
    code = llama_cpp.llama_model_quantize(*names, ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code} for {kind}")


def add_tokenizer(writer, model: Path, size: int) -> None:
    """Add the byte-level BPE of tokenizer.json."""
    spec = json.loads((model / "tokenizer.json").read_text())
    special = {token["id"] for token in spec["added_tokens"]}
    vocabulary = {**spec["model"]["vocab"], **{t["content"]: t["id"] for t in spec["added_tokens"]}}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if len(tokens) != size:
        raise ValueError(f"the tokenizer has {len(tokens)} tokens, the model {size}")
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(size)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def tensors(model: Path, config: dict):
    """Yield (GGUF's name, array).

    A Llama's q and k are reordered from split halves to interleaved pairs; matrices of a layer's
    experts are one array.
    """
    from safetensors import safe_open

    experts = config["model_type"] == "qwen3_moe"
    layer = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
    }
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    with safe_open(model / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
            array = file.get_tensor(name)
            if name in names:
                yield names[name], array
                continue
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            part = rest.removesuffix(".weight")
            if ".experts." in part:
                continue
            if part.endswith(("q_proj", "k_proj")) and not experts:
                heads = array.shape[0] // config["head_dim"]
                halves = array.reshape(heads, 2, config["head_dim"] // 2, array.shape[1])
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
            yield f"blk.{number}.{layer[part]}.weight", array
        for number in range(config["num_hidden_layers"] if experts else 0):
            for part in ("gate", "up", "down"):
                one = f"model.layers.{number}.mlp.experts.{{}}.{part}_proj.weight"
                arrays = [file.get_tensor(one.format(e)) for e in range(config["num_experts"])]
                yield f"blk.{number}.ffn_{part}_exps.weight", np.stack(arrays)


if __name__ == "__main__":
    serve(LlamaCpp)
