"""Options of `fornax diffusion serve` that are the server's."""

from dataclasses import dataclass

from fornax.config.errors import ConfigError
from fornax.diffusion.pipelines import parse_size
from fornax.llm.server.config import HttpConfig

__all__ = ["ImageServerConfig"]


@dataclass(frozen=True, kw_only=True)
class ImageServerConfig(HttpConfig):
    """The server of a model that draws."""

    widths: tuple[int, ...] = (4,)
    """Rows of the compiled steps. With one, an image is the same bit for bit whatever else is
    drawn; with more, a request alone runs in the narrowest."""
    sizes: tuple[str, ...] = ()
    """Sizes that requests may ask for, WIDTHxHEIGHT; the first is the default (default: the model's
    own size)."""
    lora: tuple[str, ...] = ()
    """Adapters of diffusers, PEFT or kohya, each NAME=FILE[:SCALE], one of which a request's
    `model` names; of two networks NAME=EARLY,LATE."""
    max_images: int = 10
    """Images of one request; more get 400."""
    max_steps: int = 100
    """Steps of one request; more get 400."""
    max_queued_requests: int = 64
    """Requests waiting for a slot; at more, requests get 429 with Retry-After."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body; a larger one gets 413."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_images", "max_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1; give at least 1")
        if self.max_queued_requests < 0:
            raise ConfigError(
                f"max_queued_requests={self.max_queued_requests} is negative; 0 is the least"
            )
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(f"widths={self.widths}; give one or more, each at least 1")
        for size in self.sizes:
            parse_size(size)
        for one in self.lora:
            name, _, file = one.partition("=")
            if not name or not file or name in (self.served_model_name or ()):
                raise ConfigError(
                    f"lora: {one!r} is not NAME=FILE with a name of its own; write "
                    "rex=rex.safetensors"
                )
        if len(self.adapters) < len(self.lora):
            raise ConfigError("lora: two adapters have one name; give each its own")

    @property
    def adapters(self) -> dict[str, str]:
        """Files, perhaps with scales, by name."""
        return {name: file for name, _, file in (one.partition("=") for one in self.lora)}
