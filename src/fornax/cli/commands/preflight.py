"""`fornax preflight`: is every parallel choice of a config numerically right?"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.cli.configured import ConfigArguments, is_diffusion_config, read_config
from fornax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Check that a training run computes what it should on its mesh, before it is rented.

    The config, of a decoder or a denoiser, runs shrunk on eight virtual CPU devices: every mesh
    axis, attention, packing, accumulation, remat and dtype of it, alone and together, against one
    device in float32. Its data and weights are not read. Every key of the config is a flag too.
    The exit code is 2 when a check fails.

    examples:
      fornax preflight --config recipes/stdlib.yaml
      fornax preflight --config run.yaml --mesh.tensor 4 --accumulate 2 --quick
      fornax preflight --config run.yaml --only mesh packing
      fornax preflight --config recipes/flux-dev.yaml --mesh.tensor 2
    """

    quick: Annotated[bool, NO_DEFAULT] = False
    """Check the choices together; one by one only if something fails."""
    only: Annotated[tuple[str, ...], arg(metavar="GROUP ...", help_behavior_hint="")] = ()
    """Groups to check: rules data attention packing accumulation remat mesh z_loss precision
    checkpoint."""
    json: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the report as JSON."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Check and print; 0 when all is right, raises ConfigError when something is not."""
    if not (arguments.config or overrides or arguments.help_config):
        raise ConfigError(
            "fornax preflight needs a config; name one with --config FILE, such as "
            "--config recipes/stdlib.yaml, or give keys as flags"
        )
    if is_diffusion_config(arguments.config):
        from fornax.diffusion.config import DiffusionConfig as Config
    else:
        from fornax.train import TrainConfig as Config
    config = read_config(Config, arguments, overrides)
    if config is None:
        return 0
    from fornax.preflight import format_check, format_report, preflight

    report = preflight(
        config,
        quick=arguments.quick,
        only=arguments.only,  # pyrefly: ignore[bad-argument-type]
        progress=lambda check: print(format_check(check), flush=True),  # noqa: T201
    )
    if arguments.json:
        try:
            arguments.json.write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the report to {arguments.json}: {error.strerror or error}; name "
                "another file"
            ) from error
    if not report.ok:
        raise ConfigError(report.paragraph())
    print(f"\n{format_report(report)}")  # noqa: T201
    return 0
