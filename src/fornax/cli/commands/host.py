"""`fornax host`: exported models behind the V2 protocol, over HTTP and gRPC."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from fornax.cli.configured import ConfigArguments, read_config
from fornax.config import ConfigError, environment

if TYPE_CHECKING:
    from fornax.serving.config import HostConfig
    from fornax.serving.entry import Entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Serve a repository of exported models by the KServe V2 protocol: HTTP and gRPC.

    The repository has a folder a model and in it a folder a version: models/ranker/3. New versions
    are loaded, checked, warmed and switched to while the server runs. SIGTERM lets accepted
    requests finish. --help-config lists every flag; most used: --http, --grpc, --control explicit,
    --model-memory 6GiB, --token-file, --tls-cert, --tls-key, --access-log all, --log-format json.

    A running server is asked by fornax host status, load, unload, rollback, release, shadow and
    profile.

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


def config_class() -> "type[HostConfig]":
    """The config whose keys are flags of this command."""
    from fornax.serving.config import HostConfig

    return HostConfig


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Serve; 0 after a stop that was asked for."""
    config = read_config(config_class(), arguments, overrides)
    if config is None:
        return 0
    if arguments.directory is not None:
        config = dataclasses.replace(config, repository=arguments.directory)
    if config.repository is None:
        raise ConfigError("no repository is named; write fornax host DIRECTORY")
    config.folder()
    environment.set_default_platform_quiet()
    environment.prepare_virtual_devices()
    try:
        from fornax.serving.run import run_host
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "fornax":
            raise
        raise ConfigError(
            f"{error.name} is not installed; hosting needs pip install 'fornax-ai[serve]'"
        ) from error
    return run_host(config, {"llm": _llm})


def _llm(name: str, folder: Path, settings: Mapping[str, Any]) -> "Entry":
    """A language model; its engine is imported only where a repository has one."""
    from fornax.llm.host_entry import LLMEntry

    return LLMEntry(name, folder, settings)
