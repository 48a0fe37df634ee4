"""The life of served versions: load, verify, warm, switch, drain, unload."""

from fornax.serving.lifecycle.manager import Manager
from fornax.serving.lifecycle.states import Instance, Loader, ServableLike, Source

__all__ = ["Instance", "Loader", "Manager", "ServableLike", "Source"]
