"""One local page over run directories, live: no account, no database, and it only reads."""

from fornax.dashboard.app import create_app, serve

__all__ = ["create_app", "serve"]
