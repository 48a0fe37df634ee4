"""Contestant: transformers on PyTorch, `generate` with its default cache and SDPA attention."""

from pathlib import Path

from _protocol import AbsentError, Record, serve


class Transformers:
    """A model of transformers in one of PyTorch's float types."""

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        if precision.startswith("int"):
            raise AbsentError(f"transformers has no {precision} for CPU without another library")
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        self._streamer = transformers.generation.streamers.BaseStreamer
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, precision), attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.details = {"versions": versions, "weights": precision, "cache": precision}

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self.turn([[2] * min(prompt, 128)] * batch, 2, Record(batch))

    def release(self) -> None:
        pass  # generate frees its cache

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        torch = self._torch

        class Streamer(self._streamer):
            prompt = True

            def put(self, value) -> None:
                if self.prompt:  # the first call brings the prompt
                    self.prompt = False
                else:
                    record.step(value.tolist())

            def end(self) -> None:
                pass

        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                do_sample=False,
                streamer=Streamer(),
            )


if __name__ == "__main__":
    serve(Transformers)
