"""What a layer of experts is made of besides its products: choice, order, and all in one call."""

from fornax.kernels._experts.fused import fused_experts, fuses_experts
from fornax.kernels._experts.order import GroupOrder, sort_by_group
from fornax.kernels._experts.route import route_top_k

__all__ = ["GroupOrder", "fused_experts", "fuses_experts", "route_top_k", "sort_by_group"]
