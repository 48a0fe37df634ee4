"""`fornax launch --replicas`: `fornax serve` or `fornax host` as replicas behind a router."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fornax.cli.arguments import parse, split
from fornax.cli.configured import read_config
from fornax.cli.registry import extra
from fornax.config import ConfigError, load

if TYPE_CHECKING:
    from fornax.cluster.ray_engine import RayEngine
    from fornax.cluster.routing import Service

__all__ = ["REPLICATED", "run_replicas"]

REPLICATED = ("serve", "host")


def run_replicas(
    replicas: int,
    words: Sequence[str],
    *,
    hosts: int,
    run_dir: Path | None,
    routing: Sequence[str],
    stall_limit: float | None,
    ray: "Callable[[int], RayEngine] | None" = None,
) -> int:
    """Serve until a signal; the exit code is that of the command.

    Args:
      words: the command, `serve` or `host`, and its own words.
      hosts: processes of a replica.
      run_dir: where events and logs go; None: runs/COMMAND-PORT.
      routing: `KEY=VALUE` of `RoutingConfig`.
      ray: opens the Ray cluster that finds room for them; None: processes of this machine.

    Raises:
      ConfigError: for a command that has no replicas, or words that it does not take.
    """
    if not words or words[0] not in REPLICATED:
        what = f"{words[0]} has no replicas" if words else "no command is named"
        raise ConfigError(
            f"{what}; --replicas takes {' and '.join(REPLICATED)}, written after two dashes: "
            "fornax launch --replicas 3 -- serve DIR --port 8000"
        )
    with extra("serve", "serving"):
        from fornax.cluster.routing import RoutingConfig, launch_replicas
    for word in routing:
        if "=" not in word:
            raise ConfigError(f"--routing {word} is not KEY=VALUE; write policy=least-requests")
    overrides = [f"--{word}" for word in routing]
    if stall_limit is not None:
        overrides.append(f"--stall-limit={stall_limit:g}")
    config = load(RoutingConfig, overrides=overrides)
    found = (_serve if words[0] == "serve" else _host)(words[1:])
    if found is None:
        return 0
    name, service = found
    with contextlib.ExitStack() as stack:
        engine = None
        if ray is not None:
            engine = stack.enter_context(contextlib.closing(ray(replicas * hosts)))
        return launch_replicas(
            service,
            run_dir or Path("runs") / name,
            replicas=replicas,
            hosts=hosts,
            config=config,
            engine=engine,
        )


_Found = tuple[str, "Callable[[Path], Service]"] | None


def _serve(words: Sequence[str]) -> _Found:
    from fornax.cli.commands.serve import Arguments
    from fornax.cluster.routing import serve_service
    from fornax.llm.server.launch import ServeConfig

    own, overrides = split(Arguments, ServeConfig, words)
    arguments = parse(Arguments, own, "fornax serve")
    config = read_config(ServeConfig, arguments, overrides)
    if config is None:
        return None
    if not arguments.model:
        raise ConfigError("no model is named; write fornax launch --replicas 3 -- serve MODEL")
    name = "serve" if config.uds or not config.port else f"serve-{config.port}"
    return name, lambda folder: serve_service(arguments.model, config, folder)


def _host(words: Sequence[str]) -> _Found:
    from fornax.cli.commands.host import Arguments
    from fornax.cluster.routing import host_service
    from fornax.serving.config import HostConfig

    own, overrides = split(Arguments, HostConfig, words)
    arguments = parse(Arguments, own, "fornax host")
    config = read_config(HostConfig, arguments, overrides)
    if config is None:
        return None
    if arguments.directory is not None:
        config = dataclasses.replace(config, repository=arguments.directory)
    if config.repository is None:
        raise ConfigError(
            "no repository is named; write fornax launch --replicas 3 -- host models/"
        )
    address = config.http_address()
    name = f"host-{address.port}" if address is not None and address.port else "host"
    return name, lambda folder: host_service(config, folder)
