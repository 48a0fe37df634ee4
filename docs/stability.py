"""How stable each public name is: writes docs/reference/stability.md from the packages' `__all__`.

`make docs` runs it. `python docs/stability.py --release` also writes the stable names, with their
parameters, to docs/reference/stable-names.txt: what the next release must still have.
docs/reference/versioning.md is the policy.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import fornax

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "stability.md"
RELEASED = ROOT / "docs" / "reference" / "stable-names.txt"
POLICY = 'docs/reference/versioning.md, "Removing a stable name"'

STABLE = {
    "fornax.config": "BundleError CheckpointError ClusterError ConfigError DataError DiskFullError "
    "EngineError FornaxError KernelError ServingError ShardingError dump_yaml from_mapping "
    "from_yaml load",
    "fornax.mesh": "MeshConfig ProcessConfig make_mesh use_mesh",
    "fornax.data": "ArrayRecord BuildConfig DataConfig Dataset HuggingFace Jsonl Mixture Parquet "
    "Part Stdlib Text Tokenize TokenizerFile TrainBpe build load_tokenizer open_batches train_bpe",
    "fornax.checkpoint": "CheckpointConfig Checkpointer",
    "fornax.models": "Decoder DecoderConfig Sampling create_decoder generate load_pretrained "
    "save_pretrained stream",
    "fornax.optim": "AdamW Clip Constant Cosine EMA Group Linear Lion Muon OptimConfig SGD WSD "
    "build build_schedule",
    "fornax.train": "EvalConfig LogConfig SpikeConfig Task TrainConfig TrainResult TrainerConfig "
    "convert export_model load_decoder load_run read_metrics train",
    "fornax.export": "Bundle Loaded Signature Spec Tensor TensorSpec Tolerance load open_bundle "
    "read_safetensors save",
    "fornax.quant": "QuantConfig QuantizationRule quantize",
    "fornax.adapters": "LoRA attach detach load_peft merge save_peft",
    "fornax.tune": "SFTConfig tune",
    "fornax.tune.config": "CPO DAPO DPO DistillConfig DrGRPO GRPO GRPOConfig GSPO IPO KTOConfig "
    "ORPO PPOConfig PreferenceConfig RLOO RewardModelConfig RolloutConfig SFTConfig SimPO",
    "fornax.rewards": "RewardPool RewardSpec Sample Score",
    "fornax.evaluate": "EvaluateConfig evaluate",
    "fornax.llm": "CompletionOutput EngineConfig LLM Logprob RequestOutput SamplingParams "
    "StructuredOutputsParams",
    "fornax.serving": "HostConfig ModelSettings run_host",
}
"""Package: its stable names. Whatever else a public package exports is provisional."""


def packages() -> list[str]:
    """The public packages, as the reference of the Python API lists them."""
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def line_of(path: str, value: object) -> str:
    """A name with its parameters, `=` after those with a default, and whether it is deprecated."""
    parameters = ""
    raised = isinstance(value, type) and issubclass(value, BaseException)
    if callable(value) and not raised:
        found = inspect.signature(value).parameters.values()
        kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        words = (
            kinds[p.kind] + p.name if p.kind in kinds else p.name + "=" * (p.default is not p.empty)
            for p in found
        )
        parameters = f"({', '.join(words)})"
    return path + parameters + (" deprecated" if hasattr(value, "__deprecated__") else "")


def stable_lines() -> list[str]:
    """A line for each stable name as it is now.

    Raises:
      ValueError: a name of `STABLE` that its package does not export.
    """
    lines = []
    for package, names in STABLE.items():
        module = importlib.import_module(package)
        for name in names.split():
            if name not in module.__all__:
                raise ValueError(f"{package}.{name} is in STABLE and not in the package's __all__")
            lines.append(line_of(f"{package}.{name}", getattr(module, name)))
    return lines


def parse(lines: Iterable[str]) -> dict[str, tuple[list[str], bool]]:
    """Of each line its name's parameters, and whether it is deprecated."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"([\w.]+)(?:\((.*)\))?( deprecated)?", line)
        if match is None:
            raise ValueError(f"{line!r} is no line of stable names")
        found[match[1]] = ((match[2] or "").split(", ") if match[2] else [], bool(match[3]))
    return found


def broken(released: Iterable[str], now: Iterable[str]) -> list[str]:
    """What code written for the released names would meet now, a sentence each."""
    current, said = parse(now), []
    for name, (parameters, deprecated) in parse(released).items():
        if deprecated:
            continue
        if name not in current:
            said.append(f"{name} was stable in the last release and is not now")
            continue
        have = current[name][0]
        gone = [p for p in parameters if p.rstrip("=") not in {h.rstrip("=") for h in have}]
        said += [f"{name} has lost its parameter {p.rstrip('=')}" for p in gone]
        said += [
            f"{name} needs {p}, which calls of the last release leave out"
            for p in have
            if not p.endswith("=") and not p.startswith("*") and p not in parameters
        ]
    return said


def released_lines() -> list[str]:
    """The stable names of the last release."""
    lines = RELEASED.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def released_version() -> str:
    """The version whose names `stable-names.txt` holds."""
    match = re.match(r"# Stable names of ([^\s,]+)", RELEASED.read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{RELEASED.name} does not begin with '# Stable names of VERSION'")
    return match[1]


def page(exported: Mapping[str, Iterable[str]]) -> str:
    """The page: for each package its stable and its provisional names."""
    parts = [
        "# Stability of public names",
        "",
        "Generated from the packages' `__all__`. [Versions and compatibility](versioning.md) says",
        "what each status promises. A module or name that is not on this page is internal.",
        "",
    ]
    for package, names in exported.items():
        stable = STABLE.get(package, "").split()
        rows = [("stable", stable), ("provisional", sorted(set(names) - set(stable)))]
        parts += [f"## {package}", "", "| status | names |", "|---|---|"]
        parts += [f"| {s} | {', '.join(f'`{n}`' for n in ns)} |" for s, ns in rows if ns]
        parts += [""]
    return "\n".join(parts)


def main(words: list[str]) -> None:
    """Write the page; with `--release`, the list of the last release too."""
    exported = {package: importlib.import_module(package).__all__ for package in packages()}
    PAGE.write_text(page(exported), encoding="utf-8")
    if words == ["--release"]:
        command = "python docs/stability.py --release"
        head = f"# Stable names of {fornax.__version__}, written by `{command}`.\n"
        RELEASED.write_text(head + "\n".join(stable_lines()) + "\n", encoding="utf-8")
    elif words:
        raise SystemExit(f"{' '.join(words)} is no option; --release is the only one")


if __name__ == "__main__":
    main(sys.argv[1:])
