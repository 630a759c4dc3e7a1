"""Strata: Mixture-of-Experts models bigger than the graphics card, planned byte by byte before they start."""

__version__ = "0.1.0"
