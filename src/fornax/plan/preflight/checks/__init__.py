"""The checks of a preflight: each module turns a lab into questions."""
