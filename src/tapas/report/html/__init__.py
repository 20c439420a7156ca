"""A plan as a page for the browser: one file that needs nothing else, and a compact view for notebooks."""

from tapas.report.html.page import notebook_html, page_html, write_page
from tapas.report.html.view import Findings, View

__all__ = ["Findings", "View", "notebook_html", "page_html", "write_page"]
