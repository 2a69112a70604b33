"""The only rooms that may import torch and transformers."""
