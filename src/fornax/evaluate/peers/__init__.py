"""Engines of others that quantize and run the same model, each by a Python that has it."""

from fornax.evaluate.peers.running import Peer, Running, Settings, find_peers, started, write_model

__all__ = ["Peer", "Running", "Settings", "find_peers", "started", "write_model"]
