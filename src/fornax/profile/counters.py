"""Hardware counters over the time of a capture, and why those that are missing are.

On CPUs the capture reads perf events; GPUs (CUPTI's samples) and TPUs have lines of counters in
their planes, one event per sample.
"""

from collections.abc import Sequence

import numpy as np

from fornax.profile.facts import Counter, Counters
from fornax.profile.raw import Raw
from fornax.profile.records import CaptureRecord

__all__ = ["read_counters"]

_WHY = {
    "cpu": "only fornax.profile.capture reads perf events, and jax.profiler alone made this",
    "gpu": "the capture has no line of counters; CUPTI samples those that "
    "jax.profiler.ProfileOptions.advanced_configuration names in gpu_pm_sample_counters",
    "tpu": "the capture has no line of counters: this TPU's profiler wrote none",
}


def read_counters(
    raws: Sequence[Raw], origins: Sequence[int], records: Sequence[CaptureRecord]
) -> Counters:
    """Counters of all ranks.

    Args:
        raws: each rank's rows.
        origins: of each rank's clock, the time that is 0.
        records: what captures of ours wrote, of the ranks that have one.
    """
    known = {record.rank: record for record in records}
    series: list[Counter] = []
    absent: dict[str, str] = {}
    for raw, origin in zip(raws, origins, strict=True):
        own = [
            Counter(
                rank=raw.rank,
                device=device,
                name=name,
                time=np.array(times, np.int64) - origin,
                value=np.array(values, np.float64),
                total=False,
            )
            for (device, name), (times, values) in raw.counters.items()
        ]
        devices = {row.device for row in raw.rows if row.device}
        silent = devices - {each.device for each in own}
        for device in sorted(each for each in silent if not each.startswith("cpu:")):
            absent[device] = _WHY[device.partition(":")[0]]
        record = known.get(raw.rank)
        if record is not None:
            own += _of_record(record, origin)
            absent |= record.counters_absent
        elif not own and not absent:
            absent["cpu"] = _WHY["cpu"]
        series += own
    return Counters(series=tuple(series), absent=absent)


def _of_record(record: CaptureRecord, origin: int) -> list[Counter]:
    if not record.counter_samples:
        return []
    times, *columns = zip(*record.counter_samples, strict=True)
    return [
        Counter(
            rank=record.rank,
            device="cpu",
            name=name,
            time=np.array(times, np.int64) - origin,
            value=np.array(values, np.float64) - values[0],
            total=True,
        )
        for name, values in zip(record.counter_names, columns, strict=True)
    ]
