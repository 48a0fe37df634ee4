"""`fornax diffusion serve`: a model that draws behind OpenAI's images API."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.diffusion.pipelines import Pipeline
    from fornax.diffusion.server.launch import ServeImagesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Serve a diffusion model with an OpenAI-compatible images API: generations, edits, variations.

    Steps of different requests run as one batch, and a request's images do not depend on the
    others'. --port, --api-key, --sizes, --widths, --max-queued-requests and more: --help-config
    lists them all. SIGTERM lets running requests finish.

    examples:
      fornax diffusion serve runs/letters --port 8000
      fornax diffusion serve sdxl/ --sizes 1024x1024 832x1216 --dtype bfloat16 --api-key SECRET
      fornax diffusion serve sdxl/ --lora rex=rex.safetensors fox=fox.safetensors:0.8
      curl localhost:8000/v1/images/generations -H 'content-type: application/json' \\
        -d '{"prompt": "bold serif R", "seed": 1}'
    """

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")] = ""
    """Folder with model_index.json, or a run directory of fornax diffusion train."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Serve; 0 after a stop that was asked for, 1 when the engine died."""
    from fornax.diffusion.server.launch import ServeImagesConfig, serve_pipeline

    config = read_config(ServeImagesConfig, arguments, overrides)
    if config is None:
        return 0
    if not arguments.model:
        raise ConfigError("no model is named; write fornax diffusion serve MODEL")
    return serve_pipeline(arguments.model, config, lambda: _load(arguments.model, config))


def _load(model: str, config: "ServeImagesConfig") -> "Pipeline":
    from fornax.diffusion.pipelines import load_pipeline, with_adapters
    from fornax.diffusion.pipelines.calibration import parse_cache, with_cache
    from fornax.diffusion.server.launch import laid_out
    from fornax.mesh import initialize, parse_dtype

    initialize()
    dtype = None if config.dtype is None else parse_dtype(config.dtype)
    pipeline = with_adapters(load_pipeline(model, dtype=dtype), named=config.adapters)
    if config.cache is not None:
        pipeline = with_cache(pipeline, model, *parse_cache(config.cache))
    return laid_out(pipeline, config)
