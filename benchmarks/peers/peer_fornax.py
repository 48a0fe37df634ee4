"""Contestant: Fornax's LLM engine in this process, driven turn by turn as `LLM.generate` does."""

import os
from pathlib import Path
from typing import Any

from _protocol import GGUF_FILES, AbsentError, Record, serve

CONTEXT, ROWS = 1152, 32
"""What the engine is made for, unless a turn needs more."""


class Fornax:
    """An engine, replaced when a turn needs a larger one."""

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        import jax

        from fornax import __version__

        self._model = model
        if precision in GGUF_FILES:
            self._model = model / "converted" / f"gguf-{precision}" / "model.gguf"
            if not self._model.exists():
                raise AbsentError("llama.cpp, which writes the file, takes no part")
        self._options: dict[str, Any] = {
            "dtype": "float32" if precision == "float32" else "bfloat16",
            "quantization": precision if precision.startswith("int") else None,
        }
        self._parts: Any = None
        self.details = {
            "versions": f"fornax {__version__}, jax {jax.__version__}",
            "weights": precision,
            "cache": self._options["dtype"],
        }

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        from fornax.llm.build import build_engine
        from fornax.llm.config import EngineConfig

        limits = self._parts.limits if self._parts else None
        if limits is None or batch > limits.max_num_seqs or prompt + new > limits.max_model_len:
            if self._parts is not None:
                self._parts.programs.close()
            self._parts = None
            config = EngineConfig(
                max_model_len=max(CONTEXT, prompt + new),
                max_num_seqs=max(ROWS, batch),
                **self._options,
            )
            self._parts = build_engine(self._model, config)
            self._parts.programs.compile_all()
            self._parts.programs.wait()
        self._parts.engine.wake()
        self.turn([[2] * min(prompt, 128)] * batch, 2, Record(batch))

    def release(self) -> None:
        if self._parts is not None:
            self._parts.engine.sleep()

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        from fornax.llm.engine import Failure
        from fornax.llm.outputs import RequestOutputKind
        from fornax.llm.sampling_params import SamplingParams

        engine, admission = self._parts.engine, self._parts.input_processor
        params = SamplingParams(
            max_tokens=new, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        for row, prompt in enumerate(prompts):
            engine.add(admission.request(prompt, params, request_id=str(row)))
        while engine.has_work:
            for output in engine.step():
                if isinstance(output, Failure):
                    raise RuntimeError(output.message)
                for token in output.outputs[0].token_ids:
                    record.token(int(output.request_id), token)


if __name__ == "__main__":
    serve(Fornax)
