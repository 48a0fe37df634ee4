"""The repository: folders of models and their versions, read without trusting what is there."""

from fornax.serving.repository.files import (
    PIN_FILE,
    name_problem,
    pin,
    read_pin,
    unpin,
    version_number,
)
from fornax.serving.repository.scan import (
    SETTINGS_FILE,
    Bundle,
    ModelFolder,
    examine,
    scan,
    scan_model,
)

__all__ = [
    "PIN_FILE",
    "SETTINGS_FILE",
    "Bundle",
    "ModelFolder",
    "examine",
    "name_problem",
    "pin",
    "read_pin",
    "scan",
    "scan_model",
    "unpin",
    "version_number",
]
