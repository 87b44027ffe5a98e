from lightning_robustness.cli.entry_point import main

__all__ = ["main"]
