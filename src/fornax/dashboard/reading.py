"""A file of metrics read to its end, by this process or by one that does nothing else."""

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config.worker_process import WorkerProcess, receive, send
from fornax.dashboard.alerts import SpikeWatch
from fornax.dashboard.folder import Folder
from fornax.dashboard.lines import Tail
from fornax.dashboard.series import Table

__all__ = ["Reader", "Reading", "work"]

_SECONDS = 600.0
"""In which a file is read, or its reader is given up."""


class Reading:
    """What a file said so far: its records as columns, and the spikes in them."""

    def __init__(self, folder: Folder, path: Path) -> None:
        """Nothing is read yet."""
        self.tail = Tail(folder, path)
        self.table = Table()
        self.spikes = SpikeWatch()

    def go_on(self) -> None:
        """Take in what there is; begin again where the file is another one."""
        more = True
        while more:
            chunk = self.tail.read()
            if chunk.restarted:
                self.table, self.spikes = Table(), SpikeWatch()
            self.table.append(self.tail.records(chunk))
            more = chunk.more
        self.spikes.look(self.table)


class Reader:
    """A process that reads one file after the other, so that several are read at a time and the
    server answers meanwhile. It ends when nobody holds it."""

    def __init__(self, folder: Folder) -> None:
        """Start it; of files outside of the folder it reads nothing."""
        self._process = WorkerProcess(f"{__name__}:work", log=None)
        self._process.send({"folder": folder.root})

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def read(self, reading: Reading, path: Path) -> None:
        """Fill what is still empty with all that a file says.

        Raises:
          EOFError: the process ended.
          TimeoutError: it takes too long.
        """
        self._process.send({"path": os.fspath(path)})
        told = self._process.receive(_SECONDS)
        columns = [
            (name, self._array(np.float64), self._array(np.int32) if partly else None)
            for name, partly in told["columns"]
        ]
        reading.tail.restore(told["tail"])
        reading.table = Table.of(told["rows"], columns)
        reading.spikes.restore(told["spikes"])

    def _array(self, dtype: type) -> np.ndarray:
        try:
            return np.frombuffer(self._process.connection.recv_bytes(), dtype)
        except OSError as error:
            raise EOFError(str(error)) from None

    def close(self) -> None:
        """End the process."""
        self._process.kill()


def work(parent: Connection) -> None:
    """The process: for each `{"path"}` what it says, then its arrays."""
    folder = Folder(Path(receive(parent)["folder"]))
    while True:
        reading = Reading(folder, Path(receive(parent)["path"]))
        reading.go_on()
        columns: list[tuple[str, np.ndarray, np.ndarray | None]] = reading.table.columns()
        told: dict[str, Any] = {
            "tail": reading.tail.state(),
            "rows": reading.table.rows,
            "spikes": reading.spikes.state(),
            "columns": [(name, rows is not None) for name, _, rows in columns],
        }
        send(parent, told)
        for _, values, rows in columns:
            parent.send_bytes(values.tobytes())
            if rows is not None:
                parent.send_bytes(rows.tobytes())
