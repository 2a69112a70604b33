"""Paged attention behind one function signature; see `layout.py`."""
