"""TensorBoard files: checksums that readers check, resumed steps, a disk that refuses."""

import os
import struct
import time
from pathlib import Path
from typing import Any

from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2

from fornax.train.tensorboard import TensorBoard

Event: Any = event_pb2.Event  # pyrefly: ignore[missing-attribute]
SessionLog: Any = event_pb2.SessionLog  # pyrefly: ignore[missing-attribute]


def read_events(directory: Path) -> list[Any]:
    """As TensorBoard reads: length, its checksum, the event, its checksum."""
    found = []
    for file in sorted(directory.iterdir()):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            body = data[place + 12 : place + 12 + length]
            (check,) = struct.unpack_from("<I", data, place + 12 + length)
            crc = crc32c(body)
            assert check == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
            found.append(Event.FromString(body))
            place += 16 + length
    return found


def test_a_resume_hides_the_steps_it_does_again(tmp_path: Path):
    board = TensorBoard(tmp_path, 40)
    board.write({"step": 41, "time": 7.5, "loss": float("nan")})
    board.close()
    version, purge, record = read_events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (purge.session_log.status, purge.step) == (SessionLog.START, 41)
    assert (record.step, record.wall_time) == (41, 7.5)


def test_events_reach_the_disk_before_close(tmp_path: Path):
    board = TensorBoard(tmp_path, 0, flush_seconds=0.0)
    board.write({"step": 1, "time": 1.0, "loss": 2.0})
    assert [e.step for e in read_events(tmp_path)] == [0, 1, 1]
    board.close()


def test_on_a_full_disk_events_are_lost_and_nothing_waits(tmp_path: Path):
    board = TensorBoard(tmp_path, 0, flush_seconds=0.0)
    full = os.open("/dev/full", os.O_WRONLY)
    writer: Any = board._writer._writer
    os.dup2(full, writer.fileno())
    began = time.monotonic()
    board.write({"step": 1, "time": 1.0, "loss": 2.0})
    os.close(full)
    for step in (2, 3):  # the file, which may end in the middle of an event, is left for another
        board.write({"step": step, "time": 1.0, "loss": 2.0})
    board.close()
    assert time.monotonic() - began < 100
    assert [e.step for e in read_events(tmp_path)] == [0, 1, 0, 2, 3]
