"""Load on an OpenAI-compatible server: `fornax bench serve`."""
