"""Measured runs, and how well the model predicts them."""
