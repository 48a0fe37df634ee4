"""Fornax's model, step and sampler inside real vLLM, which keeps its own scheduler and server.

vLLM finds `options.register` and `quantization.register` by their entry points; nothing here is
imported by Fornax itself. Without `fornax` in VLLM_PLUGINS there is no platform, and vLLM stays as
it is.
"""
