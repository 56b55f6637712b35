"""Attention to numbers: the sink metrics of a live model over a set of prompts.

``metric`` is the arithmetic of a row, ``scores`` makes rows from queries and keys, ``summary`` pools them,
``capture`` reads the attention of a running model, ``prompts`` loads what it is asked, and ``measure`` joins them
into a sink record. Of a pair, ``displacement`` compares scores and ``drift`` weights, ``qk_norm`` reads shapes, and
``diagnosis`` joins them.
"""
