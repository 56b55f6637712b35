"""Plan a merge, then stream its tensors block by block into shards on disk or into a live model.

The only caller of ``merges``. Knows pairings and headers; knows nothing of recipes, evaluations or run folders.
"""
