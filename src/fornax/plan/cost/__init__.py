"""Chip, topology and operations to seconds."""
