"""Small datasets of tokens that tests share."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fornax.data.sources.array_record import open_writer


@pytest.fixture(scope="session")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes an ArrayRecord file of uint16 documents; every token value names its document."""

    def make(name: str, lengths: list[int], first: int = 1) -> Path:
        path = tmp_path_factory.mktemp("tokens") / f"{name}.array_record"
        writer = open_writer(path, compression=False)
        for number, length in enumerate(lengths):
            writer.write(np.full(length, first + number, "<u2").tobytes())
        writer.close()
        return path

    return make
