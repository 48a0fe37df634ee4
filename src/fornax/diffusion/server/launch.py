"""From a pipeline to a running server: listen, compile, drain on SIGTERM."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Literal

import uvloop

from fornax.config.errors import ConfigError
from fornax.config.http_server import raise_file_limit
from fornax.diffusion.pipelines import Pipeline
from fornax.diffusion.pipelines.calibration import parse_cache
from fornax.diffusion.server.app import asgi_app, create_app, create_server, start
from fornax.diffusion.server.config import ImageServerConfig
from fornax.diffusion.server.engine import Engine
from fornax.diffusion.server.metrics import Metrics
from fornax.llm.server.listening import bind, serve_app
from fornax.llm.server.middleware import configure_logging
from fornax.mesh import MeshConfig, check_use, make_mesh

__all__ = ["ServeImagesConfig", "laid_out", "serve_pipeline"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeImagesConfig(ImageServerConfig):
    """Options of `fornax diffusion serve`: the server's and the model's."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights and products (default: as they are stored)."""
    cache: str | None = None
    """teacache or magcache, perhaps with a threshold (`teacache:0.3`): leave out a transformer's
    blocks at steps where they change little; they run where any row of a step needs them. See
    `fornax diffusion calibrate`."""
    mesh: MeshConfig | None = None
    """Over which of this machine's devices the denoiser is divided: data and fsdp (rows; fsdp its
    weights too, and what is left by default), tensor (heads and widths). None for one device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh is not None:
            check_use(self.mesh, "serve diffusion")
        if self.cache is not None:
            parse_cache(self.cache)


def laid_out(pipeline: Pipeline, config: ServeImagesConfig) -> Pipeline:
    """The pipeline over the devices of the config's mesh.

    Raises:
      ConfigError: widths whose rows do not divide over data and fsdp.
      ShardingError: sizes that do not multiply to the devices, or weights that do not divide.
    """
    if config.mesh is None:
        return pipeline
    mesh = make_mesh(config.mesh)
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    if any(width % rows for width in config.widths):
        raise ConfigError(
            f"widths={config.widths}: rows of a step are divided over mesh.data x mesh.fsdp = "
            f"{rows}; give multiples of it"
        )
    return pipeline.on_mesh(mesh, config.mesh.resolved_rules())


def serve_pipeline(model: str, config: ImageServerConfig, build: Callable[[], Pipeline]) -> int:
    """Serve a model until a signal stops it; the exit code.

    Args:
      model: its name, where the config has none.
      config: how.
      build: makes the pipeline, once the address is taken.

    Raises:
      ConfigError: a size that the model cannot draw.
      OSError: the address is not to be had.
    """
    configure_logging()
    raise_file_limit()
    with contextlib.closing(bind(config)) as listener:
        metrics = Metrics((config.served_model_name or (model,))[0])
        engine = Engine(build(), widths=config.widths, observer=metrics)
        server = create_server(engine, config, model=model, metrics=metrics)
        start(server)
        app = asgi_app(create_app(server))
        try:
            return uvloop.run(serve_app(app, listener, config, server))
        finally:
            engine.shutdown()
