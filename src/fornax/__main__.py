"""`python -m fornax`: the command, for an interpreter whose scripts are not on the path."""

from fornax.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
