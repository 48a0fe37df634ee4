"""Plans of training and serving as sections, shown on a terminal, as a page and as JSON."""

from fornax.plan.report.output import (
    print_plan,
    read_json,
    render_table,
    too_large,
    write_json,
    write_page,
)

__all__ = ["print_plan", "read_json", "render_table", "too_large", "write_json", "write_page"]
