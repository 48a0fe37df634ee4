"""Contestant: CTranslate2's Generator, greedy, told of each token by its callback."""

import json
from pathlib import Path

from _protocol import AbsentError, Record, converted, serve


class CTranslate2:
    """A converted model with one compute type."""

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        import ctranslate2

        if precision not in ctranslate2.get_supported_compute_types("cpu"):
            raise AbsentError(f"CTranslate2 does not compute in {precision} on this processor")
        folder = converted(model, "ctranslate2", lambda path: write(model, path))
        self._generator = ctranslate2.Generator(
            str(folder),
            device="cpu",
            compute_type=precision,
            intra_threads=threads,
            inter_threads=1,
        )
        if not self._generator.compute_type.startswith(precision):
            raise AbsentError(f"CTranslate2 fell back to {self._generator.compute_type}")
        self._names = json.loads((folder / "vocabulary.json").read_text())
        self.details = {
            "versions": f"ctranslate2 {ctranslate2.__version__}",
            "weights": precision,
            "cache": "float32" if precision == "int8" else precision,
        }

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self.turn([[2] * min(prompt, 128)] * batch, 2, Record(batch))

    def release(self) -> None:
        pass  # generate_batch frees its cache

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        def told(result) -> bool:
            record.token(result.batch_id, result.token_id)
            return False

        self._generator.generate_batch(
            [[self._names[token] for token in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            beam_size=1,
            end_token=[],
            include_prompt_in_result=False,
            callback=told,
        )


def write(model: Path, folder: Path) -> None:
    """Convert the Hugging Face directory, weights kept as float32."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(model)).convert(str(folder), quantization=None, force=True)


if __name__ == "__main__":
    serve(CTranslate2)
