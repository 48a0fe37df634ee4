"""The processes beside the hosts of a run, samplers and data workers, wherever they are placed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fornax.cluster.beside_process import BesideJob, Role
from fornax.cluster.files import ClusterFiles
from fornax.cluster.local import Launcher
from fornax.config.addresses import write_addresses
from fornax.config.errors import ClusterError
from fornax.config.jsonl import append_json_line

__all__ = ["Beside"]


@dataclass(kw_only=True)
class Beside:
    """The processes of one role."""

    files: ClusterFiles
    role: Role
    count: int
    launcher: Launcher
    """Places them."""
    order: Mapping[str, object] = field(default_factory=dict)
    """What each is sent besides its socket and credentials."""
    announce: Callable[[str], None]
    """Shows a line."""
    stall: float
    """Seconds without a heartbeat after which one counts as hanging."""

    def __post_init__(self) -> None:
        """Start the processes.

        Raises:
          ClusterError: when there is no place for one.
        """
        self._places = []
        try:
            for number in range(self.count):
                job = BesideJob(
                    run_dir=self.files.run_dir.absolute(),
                    role=self.role,
                    number=number,
                    credentials=self.launcher.credentials,
                    order=self.order,
                    stall=self.stall,
                )
                self._places.append(self.launcher.start_beside(job))
        except BaseException:
            self.close()
            raise
        self._addresses = [place.address for place in self._places]
        where = write_addresses(self.files.beside_addresses(self.role.name), self._addresses)
        self.environment: Mapping[str, str] = {self.role.addresses: where}
        """What workers must find in theirs."""

    def check(self) -> None:
        """Have those replaced that have ended or hang, and say so; many times a second.

        Raises:
          ClusterError: when one that the run needs ends by a user's error, or again and again.
        """
        for number, place in enumerate(self._places):
            for event in place.check():
                append_json_line(self.files.events, {"epoch": 0, self.role.name: number, **event})
                self.announce(event["why"])
                if event.get("state") == "ended":
                    raise ClusterError(event["why"])
        addresses = [place.address for place in self._places]
        if addresses != self._addresses:
            self._addresses = addresses
            write_addresses(self.files.beside_addresses(self.role.name), addresses)

    def close(self) -> None:
        """End the processes."""
        for number, place in enumerate(self._places):
            place.close()
            self.files.beside_record(self.role.name, number).unlink(missing_ok=True)
        self.files.beside_addresses(self.role.name).unlink(missing_ok=True)
