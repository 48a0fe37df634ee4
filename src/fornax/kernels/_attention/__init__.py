"""Attention: one signature, several implementations."""

from fornax.kernels._attention.call import AttentionCall
from fornax.kernels._attention.operation import attention, attention_operation

__all__ = ["AttentionCall", "attention", "attention_operation"]
