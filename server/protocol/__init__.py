"""Wire types, validation and rendering. Knows no aiohttp."""
