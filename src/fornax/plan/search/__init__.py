"""Finding the mesh, the micro-batches and the remat policy that train fastest on a topology."""

from fornax.plan.search.search import Candidate, Measured, SearchResult, search

__all__ = ["Candidate", "Measured", "SearchResult", "search"]
