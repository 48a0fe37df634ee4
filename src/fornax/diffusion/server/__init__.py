"""Diffusion models behind OpenAI's images API, batching the steps of different requests."""
