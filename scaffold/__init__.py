"""Write complete PyTorch distributed-training projects from a few answers."""

__version__ = "0.1.0"
