"""Finding the mesh, the micro-batches and the remat policy that train fastest on a topology."""

from fornax.plan.search.result import Candidate, Compile, Measured, SearchResult
from fornax.plan.search.search import search

__all__ = ["Candidate", "Compile", "Measured", "SearchResult", "search"]
