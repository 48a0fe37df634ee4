"""Reinforcement learning on the trainer: rollouts, rewards, advantages, and the rows they become.

`fornax.tune.tasks.grpo` and `fornax.tune.tasks.ppo` put the parts together.
"""
