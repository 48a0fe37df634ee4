"""Execution: models on devices, from weights and compiled programs to answered requests."""
