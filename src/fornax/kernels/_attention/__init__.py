"""Attention: one signature, several implementations."""

from fornax.kernels._attention.operation import attention, attention_operation

__all__ = ["attention", "attention_operation"]
