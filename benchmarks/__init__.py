"""Measurements; no part of the package."""
