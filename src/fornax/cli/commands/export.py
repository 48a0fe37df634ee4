"""`fornax export`: functions and weights sealed in a bundle; bundles printed and compared."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.export.manifest import Manifest

_SAME, _DIFFERENT = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Export functions and their weights as a bundle, or inspect bundles.

    --model DIR: functions of a language model: logits, next_token, score (log-probabilities),
    embedding; of a diffusion model: denoise. --function FILE.py:NAME: your own; NAME takes
    nothing and returns what export.save takes, as a dict: functions, params, inputs, buckets, ...
    --diff ends with 0 when both are the same, 1 when they differ, 2 when one cannot be read.

    examples:
      fornax export --model hf --function logits score --batch 1 16 --length 128 --out models/lm/1
      fornax export --function my_model.py:make --out models/ranker/1
      fornax export --inspect models/lm/1
      fornax export --diff models/lm/1 models/lm/2
    """

    model: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """A run directory, a Hugging Face directory, or a name on the Hub."""
    function: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Functions of the model (the first is the default one), or FILE.py:NAME."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The bundle to make, such as models/NAME/VERSION."""
    batch: Annotated[tuple[int, ...], arg(metavar="INT ...", help_behavior_hint="")] = ()
    """Rows that a model is compiled for (default: 1 8)."""
    length: Annotated[tuple[int, ...], arg(metavar="INT ...", help_behavior_hint="")] = ()
    """Tokens of a row that a model is compiled for (default: 64 256)."""
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint=""),
    ] = None
    """Type of a model's weights (default: as they are stored)."""
    size: Annotated[str | None, arg(metavar="WxH", help_behavior_hint="")] = None
    """Width and height in pixels for denoise (default: the model's)."""
    frames: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Of a video for denoise (default: the model's)."""
    pooling: Annotated[
        Literal["mean", "last"] | None, arg(metavar="{mean,last}", help_behavior_hint="")
    ] = None
    """How embedding pools a model's hidden states (default: mean)."""
    platforms: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Of cpu, cuda, rocm, tpu (default: cpu cuda tpu)."""
    executables: Annotated[bool, NO_DEFAULT] = False
    """Add native code for this machine, for a faster start."""
    overwrite: Annotated[bool, NO_DEFAULT] = False
    """Replace a bundle that exists."""
    inspect: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Verify a bundle and print it all."""
    diff: Annotated[tuple[Path, Path] | None, arg(metavar="A B", help_behavior_hint="")] = None
    """Compare signatures, graphs, weights, and outputs on the golden inputs."""
    json: Annotated[bool, NO_DEFAULT] = False
    """Print --inspect and --diff as JSON."""


def run(arguments: Arguments) -> int:
    """Export, inspect or compare."""
    chosen = [name for name in ("inspect", "diff") if getattr(arguments, name) is not None]
    making = arguments.model is not None or bool(arguments.function)
    if len(chosen) + making != 1:
        raise ConfigError(
            "fornax export makes one bundle (--model DIR or --function FILE.py:NAME, with --out "
            "DIR), or looks at some (--inspect DIR, --diff A B); give one of these"
        )
    _refuse_others(arguments, chosen)
    if arguments.inspect is not None:
        return _inspect(arguments.inspect, arguments.json)
    if arguments.diff is not None:
        return _diff(*arguments.diff, arguments.json)
    if arguments.out is None:
        raise ConfigError("name the bundle to make with --out DIR, such as models/NAME/1")
    from fornax.mesh import initialize

    initialize()
    own = [name for name in arguments.function if ":" in name]
    if arguments.model is not None:
        if own:
            raise ConfigError(
                f"--function {own[0]} brings weights of its own; leave --model out, or name "
                "functions of the model"
            )
        manifest = _export_model(arguments, arguments.model, arguments.out)
    else:
        if len(arguments.function) != 1 or not own:
            raise ConfigError(
                f"--function {' '.join(arguments.function)} without --model is one of your own, "
                "FILE.py:NAME; for functions of a model add --model DIR"
            )
        manifest = _export_own(arguments, own[0], arguments.out)
    _say(manifest, arguments.out)
    return 0


_MODEL_ONLY = ("batch", "length", "dtype", "size", "frames", "pooling")
_MAKING = (*_MODEL_ONLY, "out", "platforms", "executables", "overwrite")


def _refuse_others(arguments: Arguments, chosen: Sequence[str]) -> None:
    """No flag is accepted and ignored."""
    if chosen:
        for name in _MAKING:
            if getattr(arguments, name) not in (None, (), False):
                raise ConfigError(f"--{name} has no effect with --{chosen[0]}; leave it out")
    elif arguments.json:
        raise ConfigError("--json is for --inspect and --diff; leave it out")
    elif arguments.model is None:
        for name in _MODEL_ONLY:
            if getattr(arguments, name) not in (None, ()):
                raise ConfigError(
                    f"--{name} is for a model; your own function says it in what it returns"
                )
    elif arguments.pooling and "embedding" not in arguments.function:
        raise ConfigError("--pooling is for the function embedding; leave it out")


def _options(arguments: Arguments) -> dict[str, Any]:
    """What was asked of `export.save`; what was not stays with it."""
    names = ("platforms", "executables", "overwrite")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name)}


def _export_model(arguments: Arguments, model: Path, out: Path) -> "Manifest":
    from fornax.diffusion.load import is_diffusion_run, is_pipeline
    from fornax.mesh import parse_dtype
    from fornax.train import export_model

    options = _options(arguments)
    if is_diffusion_run(model) or is_pipeline(model) or arguments.function == ("denoise",):
        return _export_denoiser(arguments, model, out)
    for name in ("size", "frames"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for models that draw; {model} is a language model")
    if arguments.batch:
        options["batch"] = arguments.batch
    if arguments.length:
        options["lengths"] = arguments.length
    if arguments.dtype is not None:
        options["dtype"] = parse_dtype(arguments.dtype)
    if arguments.pooling is not None:
        options["pooling"] = arguments.pooling
    return export_model(model, out, functions=arguments.function or ("logits",), **options)


def _export_denoiser(arguments: Arguments, model: Path, out: Path) -> "Manifest":
    from fornax.diffusion.exporting import export_denoiser
    from fornax.diffusion.load import is_diffusion_run, open_tuned
    from fornax.diffusion.pipelines import parse_size
    from fornax.diffusion.pipelines.exporting import export_pipeline
    from fornax.mesh import parse_dtype

    other = [name for name in arguments.function if name != "denoise"]
    if other:
        raise ConfigError(f"function {other[0]!r} is none of a diffusion model's; it has denoise")
    for name in ("length", "pooling"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is for language models, and {model} draws images")
    options = _options(arguments)
    if arguments.batch:
        options["batch"] = arguments.batch
    if arguments.dtype is not None:
        options["dtype"] = parse_dtype(arguments.dtype)
    if arguments.size is not None:
        options["size"] = parse_size(arguments.size)
    if arguments.frames is not None:
        options["frames"] = arguments.frames
    whole = not is_diffusion_run(model) or open_tuned(model) is not None
    return (export_pipeline if whole else export_denoiser)(model, out, **options)


def _export_own(arguments: Arguments, name: str, out: Path) -> "Manifest":
    from fornax import export
    from fornax.config import load_name, user_errors

    make = load_name(name)
    if needed := _needed(make):
        raise ConfigError(
            f"{name} takes arguments ({', '.join(needed)}); name a function that takes none and "
            "returns a dict of export.save's arguments: functions, params, inputs, buckets, ..."
        )
    with user_errors(name):
        made = make()
    if not isinstance(made, Mapping):
        raise ConfigError(
            f"{name} returned a {type(made).__name__}; it returns a dict of export.save's "
            "arguments: functions, params, inputs, buckets, ..."
        )
    missing = [key for key in ("functions", "params", "inputs") if key not in made]
    known = _parameters(export.save)
    unknown = [key for key in made if key not in known or key == "path"]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}"
        raise ConfigError(
            f"what {name} returned {what}; it is a dict of export.save's arguments: "
            f"{', '.join(key for key in known if key != 'path')}"
        )
    with user_errors(name):
        return export.save(out, **{**made, **_options(arguments)})


def _parameters(function: Any) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)


def _needed(function: Any) -> list[str]:
    """The arguments that a function cannot be called without."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable that does not tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _say(manifest: "Manifest", out: Path) -> None:
    from fornax.export.inspect import bytes_text, shape_text

    size = bytes_text(sum(file.size for file in manifest.files.values()))
    print(  # noqa: T201
        f"{out}: {len(manifest.files)} files, {size}, for {', '.join(manifest.platforms)}"
    )
    for name, function in manifest.functions.items():
        signature = function.signature
        inputs, outputs = (
            ", ".join(f"{spec.name} {spec.dtype}{shape_text(spec.shape)}" for spec in specs)
            for specs in (signature.inputs.values(), signature.outputs.values())
        )
        print(f"  {name}({inputs}) -> {outputs}")  # noqa: T201


def _inspect(path: Path, as_json: bool) -> int:
    from fornax.export.inspect import describe, lines

    found = describe(path)
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))  # noqa: T201
    return 0


def _diff(a: Path, b: Path, as_json: bool) -> int:
    from fornax.export.compare import compare, lines

    found = compare(a, b)
    if as_json:
        told = {"same": found.same, **dataclasses.asdict(found)}
        print(json.dumps(told, indent=1))  # noqa: T201
    else:
        print("\n".join(lines(found)))  # noqa: T201
    return _SAME if found.same else _DIFFERENT
