"""Grain's prefetching around a block of shards: none, a thread, or a process."""

from typing import Any

import grain
from grain.experimental import ThreadPrefetchIterDataset

from fornax.config.errors import DataError, FornaxError
from fornax.data.block import BlockDataset, Element


class Prefetched:
    """Elements of a block, made ahead by up to `buffer` lists, in a thread or a process."""

    def __init__(self, dataset: BlockDataset, *, buffer: int, process: bool):
        self._ready: list[Element] = []
        ahead: grain.IterDataset[Any] = dataset
        if process:
            _mark_flags_parsed()
            ahead = dataset.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=buffer)
            )
        elif buffer:
            ahead = ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=buffer)
        self._iterator = iter(ahead)

    def start(self) -> None:
        """Begin now."""
        self._iterator.start_prefetch()

    def __next__(self) -> Element:
        if not self._ready:
            self._ready = self._next_list()[::-1]
        return self._ready.pop()

    def _next_list(self) -> list[Element]:
        try:
            return next(self._iterator)
        except (FornaxError, StopIteration):
            raise
        except RuntimeError as error:
            if "Worker process was terminated" in str(error):
                raise DataError(
                    f"a data worker process ended unexpectedly ({error}): lower "
                    "prefetch.workers or free memory"
                ) from error
            raise

    def close(self) -> None:
        """Stop the thread or process."""
        self._iterator.close()


def _mark_flags_parsed() -> None:
    """Grain's workers read absl flags, which a program without `absl.app` never parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
