"""One script a published figure: ``python -m benchmarks.reproducers.NAME``."""
