"""`fornax diffusion serve` over a small random network: the argument is the config as JSON."""

import json
import sys

from tests.unit.diffusion.server.conftest import make_pipeline

from fornax.config import from_mapping
from fornax.diffusion.server.launch import ServeImagesConfig, serve_pipeline


def main() -> int:
    config = from_mapping(ServeImagesConfig, json.loads(sys.argv[1]))
    return serve_pipeline("letters", config, make_pipeline)


if __name__ == "__main__":
    sys.exit(main())
