"""The role of vLLM: continuous batching over a paged cache, with vLLM's interface."""
