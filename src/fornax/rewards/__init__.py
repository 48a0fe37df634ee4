"""Reward functions and verifiers, run apart from the program that asks for them."""
