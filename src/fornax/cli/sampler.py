"""The process of a sampler: `fornax launch --samplers` starts it with the words of the command."""

import os
import socket
from collections.abc import Callable, Sequence

from fornax.cli.arguments import parse, split
from fornax.cli.commands.tune import command
from fornax.cli.failures import report
from fornax.config import ConfigError, worker_record
from fornax.config.credentials import Credentials
from fornax.tune.methods import METHODS

__all__ = ["serve"]


def serve(words: Sequence[str], listener: int, credentials: Credentials) -> int:
    """Draw what the trainer asks until this process is ended; the exit code of a mistake.

    Args:
      words: the launched command, such as `tune grpo --model DIR`.
      listener: descriptor of a listening socket.
      credentials: what connections must show.
    """
    try:
        _serve(words, listener, credentials)
    except (Exception, KeyboardInterrupt) as error:
        return report(error, None)
    return 0


def _serve(words: Sequence[str], listener: int, credentials: Credentials) -> None:
    from fornax.cluster.launch import check_sampled
    from fornax.mesh import ProcessConfig, initialize
    from fornax.tune.policy import fit_to_model, read_origin
    from fornax.tune.rl.components import shard_sampler
    from fornax.tune.rollout.sampler_server import SamplerServer, ShardSampler
    from fornax.tune.tasks.student import student_sampler

    record = worker_record.current()
    assert record is not None
    check_sampled(words)
    method = METHODS[words[1]]
    tune = command(method.name)
    own, overrides = split(tune.Arguments, method.config_class(), words[2:])
    arguments = parse(tune.Arguments, own, f"fornax tune {method.name}")
    config, _ = tune.read(arguments, overrides)
    if config is None:
        raise ConfigError("a launched command runs; leave --print-config and --help-config out")
    initialize(ProcessConfig(num_processes=1))
    origin = read_origin(config)
    record.change("compile", -1)
    makers: dict[str, Callable[..., ShardSampler]] = {"distill": student_sampler}
    sampler = makers.get(method.name, shard_sampler)(fit_to_model(config, origin), origin)
    server = SamplerServer(socket.socket(fileno=os.dup(listener)), credentials)
    server.run(sampler, record.change)
