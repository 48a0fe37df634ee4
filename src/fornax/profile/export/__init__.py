"""A capture for other tools: XProf's pages, on a CPU too, and Perfetto's time line."""

from fornax.profile.export.perfetto import write_perfetto
from fornax.profile.export.xprof import write_xprof

__all__ = ["write_perfetto", "write_xprof"]
