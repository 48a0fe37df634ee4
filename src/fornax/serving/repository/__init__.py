"""The repository: folders of models and their versions, read without trusting what lies there."""

from fornax.serving.repository.bundles import Bundle, examine
from fornax.serving.repository.names import name_problem, version_number
from fornax.serving.repository.pins import PIN_FILE, pin, read_pin, unpin
from fornax.serving.repository.policy import Choice, choose
from fornax.serving.repository.scan import SETTINGS_FILE, ModelFolder, scan, scan_model

__all__ = [
    "PIN_FILE",
    "SETTINGS_FILE",
    "Bundle",
    "Choice",
    "ModelFolder",
    "choose",
    "examine",
    "name_problem",
    "pin",
    "read_pin",
    "scan",
    "scan_model",
    "unpin",
    "version_number",
]
