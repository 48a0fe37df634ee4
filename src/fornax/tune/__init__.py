"""The role of Tunix: supervised tuning, preference, reinforcement learning, distillation."""
