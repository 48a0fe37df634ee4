"""Rewards: functions of the user's and built-in verifiers, run in processes that may fail."""

from fornax.rewards.pool import RewardPool
from fornax.rewards.spec import Message, RewardSpec, Sample, Score, Verdict

__all__ = ["Message", "RewardPool", "RewardSpec", "Sample", "Score", "Verdict"]
