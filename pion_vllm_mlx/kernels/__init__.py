"""Attention over a resident prefix: one specification, several implementations.

``api`` is what the server and the client's attention patch call; ``reference`` says what every
implementation computes.  This package imports nothing of the product but ``errors`` and
``config``, and mlx only where an mlx kernel runs.
"""
