"""A process that writes the page of one capture, or of two compared, and ends."""

from multiprocessing.connection import Connection
from pathlib import Path

from fornax.config.errors import FornaxError
from fornax.config.worker_process import receive, send
from fornax.profile.compare import compare, figures
from fornax.profile.page import write_page
from fornax.profile.read import read

__all__ = ["work"]


def work(parent: Connection) -> None:
    """Take `{"captures": [folder, or the one before a change and the one after], "page": file}` and
    answer `{"error": str | null}`. Of sources the page shows Fornax's own alone."""
    asked = receive(parent)
    try:
        profiles = [read(folder) for folder in asked["captures"]]
        compared = figures(compare(*profiles)) if len(profiles) == 2 else None
        write_page(profiles[-1], Path(asked["page"]), compared=compared, own_sources_only=True)
    except FornaxError as error:
        send(parent, {"error": str(error)})
    else:
        send(parent, {"error": None})
