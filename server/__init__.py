"""The asynchronous half of Noria: HTTP in, server-sent events out. It imports `core`, never the reverse."""
