"""One file for each command: `Arguments` (its flags and help) and `run` (one call, an exit code).

A module is imported only when its command is asked for, and imports what it calls inside `run`, so
that help never waits for jax.
"""
