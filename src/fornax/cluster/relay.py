"""Between a controller and an agent: a process that a drill holds, to cut the host off.

It passes on what the two say to each other. While it is held (SIGSTOP) nothing passes and nothing
is closed, as when a network loses all packets. Workers reach each other directly, as jax has them
do.
"""

from multiprocessing.connection import Connection, wait
from typing import IO, Any

from fornax.config.worker_process import WorkerProcess, receive

__all__ = ["Relayed", "run"]


class Relayed:
    """An agent's process on this machine, reached through a relay from now on."""

    def __init__(self, agent: WorkerProcess, log: IO[Any]) -> None:
        """Start the relay; what the agent said and nobody has read yet passes it too.

        Args:
          agent: of which no message has been read by half.
          log: file for what the relay prints.
        """
        end = agent.connection.fileno()
        self._agent = agent
        self._relay = WorkerProcess("fornax.cluster.relay:run", log=log, inherit=(end,))
        self._relay.send({"agent": end})
        self.connection = self._relay.connection
        self.send, self.receive = self._relay.send, self._relay.receive
        self.pid = self._relay.pid

    def kill(self) -> int:
        """End relay, agent and workers."""
        self._relay.kill()
        return self._agent.kill()


def run(controller: Connection) -> None:
    """The relay's process: until the controller or the agent is gone."""
    agent = Connection(receive(controller)["agent"])
    towards = {controller: agent, agent: controller}
    while True:
        for ready in wait([controller, agent]):
            assert isinstance(ready, Connection)
            towards[ready].send_bytes(ready.recv_bytes())
