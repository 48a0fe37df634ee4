"""`fornax host`: exported models behind the V2 protocol, over HTTP and gRPC."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from fornax.cli.configured import ConfigArguments, read_config
from fornax.cli.registry import extra
from fornax.config import ConfigError, environment

if TYPE_CHECKING:
    from fornax.serving.backend import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Serve a repository of exported models by the KServe V2 protocol: HTTP and gRPC.

    The repository has a folder per model and in it a folder per version: models/ranker/3. New
    versions are loaded, checked, warmed and switched to while the server runs. SIGTERM lets
    accepted requests finish. --help-config lists every flag; most used: --http, --grpc, --control
    explicit, --model-memory 6GiB, --token-file, --tls-cert, --tls-key, --access-log all,
    --log-format json.

    A running server is controlled by fornax host status, load, unload, rollback, release, shadow
    and profile.

    examples:
      fornax host models/ --http 8080 --grpc 8081
      fornax host models/ --http 0.0.0.0:8080 --grpc none --token-file tokens.txt
      fornax host status --url 127.0.0.1:8080
      curl localhost:8080/v2/health/ready
    """

    directory: Annotated[
        Positional[Path | None], arg(metavar="[REPOSITORY]", help_behavior_hint="")
    ] = None
    """Folder of models (default: the config's repository)."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Serve; 0 after a stop that was asked for."""
    from fornax.serving.config import HostConfig

    config = read_config(HostConfig, arguments, overrides)
    if config is None:
        return 0
    if arguments.directory is not None:
        config = dataclasses.replace(config, repository=arguments.directory)
    if config.repository is None:
        raise ConfigError("no repository is named; write fornax host DIRECTORY")
    config.folder()
    environment.set_default_platform_quiet()
    environment.prepare_virtual_devices()
    with extra("serve", "hosting"):
        from fornax.serving.run import run_host
    return run_host(config, {"llm": _llm})


def _llm(name: str, folder: Path, settings: Mapping[str, object]) -> "Backend":
    """A language model; its engine is imported only where a repository has one."""
    from fornax.llm.host_entry import LLMEntry

    return LLMEntry(name, folder, settings)
