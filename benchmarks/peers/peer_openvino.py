"""Contestant: OpenVINO GenAI's continuous batching pipeline, stepped from here."""

import json
from pathlib import Path

from _protocol import AbsentError, Record, converted, serve

HINTS = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "int8": {},
}
"""Int8 weights run with the defaults: dynamic quantization, and a cache of 8 bits."""


class OpenVino:
    """A converted model; each shape gets a new pipeline, whose cache has a fixed size."""

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        if precision not in HINTS:
            raise AbsentError(f"its {precision} is not converted here")
        self._genai, self._tensor, self._array = openvino_genai, openvino.Tensor, np.asarray
        kind = "int8" if precision == "int8" else "fp32"
        self._folder = converted(model, f"openvino-{kind}", lambda path: write(model, path, kind))
        self._properties = {**HINTS[precision], "INFERENCE_NUM_THREADS": threads}
        config = json.loads((model / "config.json").read_text())
        self._bytes = (
            2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
        )
        self._pipeline = None
        self.details = {
            "versions": f"openvino-genai {openvino_genai.__version__}",
            "weights": precision,
            "cache": "uint8" if precision == "int8" else precision,
        }

    def release(self) -> None:
        self._pipeline = None

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self.release()
        settings = self._genai.SchedulerConfig()
        settings.max_num_seqs = batch
        settings.max_num_batched_tokens = 2048
        settings.dynamic_split_fuse = True
        settings.enable_prefix_caching = False
        needed = batch * (prompt + new + 64) * self._bytes
        settings.cache_size = max(1, -(-needed // 2**30))
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            str(self._folder), settings, "CPU", self._properties
        )
        self.turn([[2] * min(prompt, 128)] * batch, 2, Record(batch))

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        pipeline = self._pipeline
        assert pipeline is not None
        options = self._genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        handles = [
            pipeline.add_request(row, self._tensor(self._array([prompt], "int64")), options)
            for row, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for row, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            record.token(row, token)


def write(model: Path, folder: Path, kind: str) -> None:
    """Export with optimum-intel, and the tokenizer that the pipeline asks for."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    quantization = OVWeightQuantizationConfig(bits=8) if kind == "int8" else None
    exported = OVModelForCausalLM.from_pretrained(
        model, export=True, load_in_8bit=False, quantization_config=quantization, compile=False
    )
    exported.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(folder)
    import openvino
    from openvino_tokenizers import convert_tokenizer

    to_ids, to_text = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(to_ids, folder / "openvino_tokenizer.xml")
    openvino.save_model(to_text, folder / "openvino_detokenizer.xml")


if __name__ == "__main__":
    serve(OpenVino)
