"""What the routes share: the engine, the model's names and sizes, how busy the server is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from fornax.diffusion.pipelines import Size
from fornax.diffusion.server.config import ImageServerConfig
from fornax.diffusion.server.engine import Engine
from fornax.diffusion.server.metrics import Metrics
from fornax.llm.server.base import BaseServer
from fornax.llm.server.errors import ApiError

__all__ = ["Server", "ServerDep"]

_MOST_VALUES = 4096


@dataclass(kw_only=True)
class Server(BaseServer[Engine, ImageServerConfig, Metrics]):
    """The running server."""

    sizes: Mapping[str, Size]
    """By their names, the default first."""

    @property
    def places(self) -> int:
        """Requests that the engine runs at once."""
        return self.engine.slots

    def check_json(self, body: bytes) -> None:
        """400 for a body of more values than any of the API's has."""
        values = body.count(b",") + 1
        if values > _MOST_VALUES:
            raise ApiError(
                400, f"the body has {values} values by its commas; send at most {_MOST_VALUES}"
            )

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not here."""
        adapters = self.engine.pipeline.adapters
        if name is not None and name not in (*self.names, *adapters):
            raise self.unknown(name, adapters)


async def _server(request: Request) -> Server:
    return request.app.state.server


ServerDep = Annotated[Server, Depends(_server)]
