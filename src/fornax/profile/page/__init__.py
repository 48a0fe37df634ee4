"""The page of a profile: one HTML file that works offline in any browser."""

from fornax.profile.page.data import page_data, write_page

__all__ = ["page_data", "write_page"]
