"""Mixtures of experts in config.json: Mixtral, Qwen2-MoE and Qwen3-MoE, OLMoE."""
