"""Fornax's model, step and sampler inside real vLLM, which keeps its own scheduler and server.

vLLM finds `platform.register` by its entry point; nothing here is imported by Fornax itself.
Where both are installed vLLM takes this platform, unless VLLM_PLUGINS is set and does not name it.
"""
