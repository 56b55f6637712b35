"""Merge arithmetic: one published method a file, pure functions from tensors to a tensor.

Nothing here reads a file, knows a model family or draws from a global random stream. ``parameters`` needs
only the standard library; the methods need torch as well.
"""
