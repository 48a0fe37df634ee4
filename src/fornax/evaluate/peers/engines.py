"""Engines of others, as `fornax bench quant --peers` runs them: by a Python that has them.

Fornax does not import this file, and it imports nothing of Fornax. It is run as

    PYTHON engines.py                                 answers {"engines": [name, ...]}
    PYTHON engines.py ENGINE score MODEL SETTINGS     answers {"load_s": seconds}
    PYTHON engines.py ENGINE generate MODEL SETTINGS

with SETTINGS as JSON: threads, dtype, rows (that are generated together, at most) and length
(tokens of a row, at most). Then each line of standard input is answered by one of standard output:

    score:      {"tokens": [...], "file": PATH}       {}: PATH has logits [T, V], as numpy.save
    generate:   {"prompts": [[...], ...], "new": n}   {"seconds": s, "tokens": how many were made}
                {"memory": true}                      {"bytes": of the process, no file behind}

Legend: T tokens, V vocabulary.
"""

import ctypes
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Score = Callable[[list[int]], np.ndarray]
"""Tokens -> logits [T, V]."""
Generate = Callable[[list[list[int]], int], int]
"""Prompts of one length, tokens to generate for each -> tokens generated in all; greedy."""

_CHUNK = 512
"""Prompt tokens of one call of llama.cpp: its own default."""


class Openvino:
    """A folder of optimum-intel's export, with the engine's own defaults but for the dtype."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self._model, self._settings = model, settings
        hints = {"float32": "f32", "bfloat16": "bf16"}
        self._options: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if settings["dtype"] is not None:
            self._options["INFERENCE_PRECISION_HINT"] = hints[settings["dtype"]]

    def score(self) -> Score:
        import openvino

        file = Path(self._model) / "openvino_model.xml"
        compiled = openvino.Core().compile_model(file, "CPU", self._options)
        request = compiled.create_infer_request()
        names = {name for port in compiled.inputs for name in port.names}

        def run(tokens: list[int]) -> np.ndarray:
            request.reset_state()
            ids = np.array([tokens], np.int64)
            given = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.arange(ids.size)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            found = request.infer({name: given[name] for name in given if name in names})
            return found["logits"][0]

        return run

    def generate(self) -> Generate:
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = self._settings["rows"]
        scheduler.enable_prefix_caching = False
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            self._model, scheduler, "CPU", self._options
        )

        def run(prompts: list[list[int]], new: int) -> int:
            one = openvino_genai.GenerationConfig(
                max_new_tokens=new, ignore_eos=True, do_sample=False
            )
            tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
            done = pipeline.generate(tensors, [one] * len(prompts))
            return sum(len(row) for each in done for row in each.m_generation_ids)

        return run


class Ctranslate2:
    """A folder of its converter, computed in the type that its weights have."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        import ctranslate2

        computes = "int8_bfloat16" if settings["dtype"] == "bfloat16" else "int8_float32"
        self._generator = ctranslate2.Generator(
            model, device="cpu", compute_type=computes, intra_threads=settings["threads"]
        )
        self._names = json.loads((Path(model) / "vocabulary.json").read_text())

    def score(self) -> Score:
        return lambda tokens: np.array(self._generator.forward_batch([tokens]))[0]

    def generate(self) -> Generate:
        def run(prompts: list[list[int]], new: int) -> int:
            done = self._generator.generate_batch(
                [[self._names[token] for token in prompt] for prompt in prompts],
                max_length=new,
                min_length=new,
                sampling_topk=1,
                end_token=[],
                include_prompt_in_result=False,
            )
            return sum(len(each.sequences_ids[0]) for each in done)

        return run


class Llamacpp:
    """A GGUF file, through llama.cpp's C functions, which Python's own class runs a row at a time.

    One context has all rows; its cache is of float16, the default.
    """

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        import llama_cpp

        self._library, rows = llama_cpp, settings["rows"]
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        loaded = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not loaded:
            raise RuntimeError("llama.cpp cannot load the file")
        self._V = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        options = llama_cpp.llama_context_default_params()
        options.n_seq_max = rows
        options.n_ctx = rows * -(-settings["length"] // 256) * 256
        options.n_batch = options.n_ubatch = _CHUNK
        options.n_threads = options.n_threads_batch = settings["threads"]
        self._context = llama_cpp.llama_init_from_model(loaded, options)
        self._batch = llama_cpp.llama_batch_init(_CHUNK, 0, 1)

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> list[np.ndarray]:
        """The logits [V] of those (token, position, row, wanted) whose are wanted."""
        library, batch, found = self._library, self._batch, []
        for start in range(0, len(entries), _CHUNK):
            part = entries[start : start + _CHUNK]
            batch.n_tokens = len(part)
            for index, (token, position, row, wanted) in enumerate(part):
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = wanted
            if code := library.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            for index in (index for index, entry in enumerate(part) if entry[-1]):
                address = library.llama_get_logits_ith(self._context, index)
                values = ctypes.cast(address, ctypes.POINTER(ctypes.c_float * self._V)).contents
                found.append(np.frombuffer(values, np.float32).copy())
        return found

    def _clear(self) -> None:
        memory = self._library.llama_get_memory(self._context)
        self._library.llama_memory_clear(memory, True)

    def score(self) -> Score:
        def run(tokens: list[int]) -> np.ndarray:
            self._clear()
            return np.stack(self._run([(token, t, 0, True) for t, token in enumerate(tokens)]))

        return run

    def generate(self) -> Generate:
        def run(prompts: list[list[int]], new: int) -> int:
            self._clear()
            length = len(prompts[0])
            entries = [
                (token, t, row, t == length - 1)
                for row, prompt in enumerate(prompts)
                for t, token in enumerate(prompt)
            ]
            for step in range(new):
                last = [int(logits.argmax()) for logits in self._run(entries)]
                entries = [(token, length + step, row, True) for row, token in enumerate(last)]
            return new * len(prompts)

        return run


ENGINES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "llama.cpp": (Llamacpp, ("llama_cpp",)),
    "OpenVINO": (Openvino, ("openvino", "openvino_genai", "optimum.intel", "nncf")),
    "CTranslate2": (Ctranslate2, ("ctranslate2", "transformers", "torch")),
}
"""By name: the class, and the modules that it and its conversion need."""


def main(words: list[str], say: Callable[[dict[str, Any]], None]) -> None:
    """See the head of this file."""
    if not words:
        say({"engines": [name for name, (_, modules) in ENGINES.items() if _there(modules)]})
        return
    name, task, model, settings = words
    began = time.perf_counter()
    call = getattr(ENGINES[name][0](model, json.loads(settings)), task)()
    say({"load_s": time.perf_counter() - began})
    for line in sys.stdin:
        asked = json.loads(line)
        if "file" in asked:
            np.save(asked["file"], call(asked["tokens"]).astype(np.float32))
            say({})
        elif "prompts" in asked:
            began = time.perf_counter()
            count = call(asked["prompts"], asked["new"])
            say({"seconds": time.perf_counter() - began, "tokens": count})
        else:
            say({"bytes": _anonymous()})


def _there(modules: tuple[str, ...]) -> bool:
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # of a package around it
        return False


def _anonymous() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon")), None)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print goes to standard error

        def _say(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        main(sys.argv[1:], _say)
