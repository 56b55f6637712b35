"""Tensor bytes: headers, reading, writing, fingerprints, hub snapshots.

This room knows where the bytes of a tensor lie and nothing of what its name means; names live in
``mergelab.towers``.

- ``headers``: open a folder and check all of it before any work, ``open_checkpoint``.
- ``safetensors_format``: the format itself, one file's header in both directions.
- ``pickled``: where the tensors of a ``pytorch_model.bin`` lie, through torch's weights-only loading.
- ``reader``: whole tensors or flat ranges of entries, ``read_tensor``, ``read_entries``.
- ``fingerprint``: one notion of content hash for files and live tensors.
- ``writer``: a new folder, whole or absent, ``CheckpointWriter``.
- ``hub``: from a source in a pair file to a folder, ``resolve_source``.
- ``remote``: a hub repository from its headers alone, ``open_source``.
"""
