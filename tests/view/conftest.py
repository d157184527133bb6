from browser_helpers import browser, page

__all__ = ["browser", "page"]
