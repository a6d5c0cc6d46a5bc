"""A PyTorch mixture-of-experts model to calibrate and validate predictions with.

The only package that may import torch (extra ``torch``). Importing ``moe_ref`` itself does not load
it, and so works where it is not installed.
"""
