"""One process of the data tests: reads its share of the batches and writes them down."""

import json
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """Arguments: settings.json, this process, all processes, batches, output without suffix."""
    settings, index, count, batches, output = sys.argv[1:]
    from fornax.config import from_mapping
    from fornax.data import DataConfig, open_batches

    content = json.loads(Path(settings).read_text())
    config = from_mapping(DataConfig, content["data"])
    opened = open_batches(
        config, batch_size=16, seq_len=64, process_index=int(index), process_count=int(count)
    )
    if content["state"] is not None:
        opened.restore({int(shard): state for shard, state in content["state"].items()})
    made = [next(opened) for _ in range(int(batches))]
    names = made[0]
    np.savez(f"{output}.npz", **{name: np.stack([b[name] for b in made]) for name in names})
    Path(f"{output}.json").write_text(json.dumps(opened.state()))
    opened.close()


if __name__ == "__main__":
    main()
