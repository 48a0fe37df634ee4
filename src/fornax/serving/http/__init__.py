"""The V2 protocol over HTTP: the app, its limits, and what uvicorn needs to serve it."""

__all__: list[str] = []
