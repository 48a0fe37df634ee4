"""The command `fornax`: parse, call, exit code; nothing else. `main.py` is the entry point."""
