"""Attention to numbers: the sink metrics of a live model over a set of prompts.

``metric`` is the arithmetic of a row, ``summary`` pools rows, ``capture`` reads the attention of a running
model, ``prompts`` loads what it is asked, and ``measure`` joins them into a sink record.
"""
