"""The synchronous half of Noria: scheduling, KV blocks, the model. No asyncio and no HTTP in here."""

__version__ = "0.1.0"
