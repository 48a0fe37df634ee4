"""Know before you rent: does a run compile, fit, and how fast will it be, on which slice."""
