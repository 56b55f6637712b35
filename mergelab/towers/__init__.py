"""Tensor names: where the text tower of a checkpoint is, and which tensors of checkpoints belong together.

Everything works on names, shapes, dtypes, configs and tokenizer files; no tensor data is read and torch is
never imported. Bytes live in ``mergelab.checkpoints``, whose headers fit the protocols here.

- ``generic``: the layouts that a prefix describes: roots, roles, buffers.
- ``rules``: families that need more, as data; one YAML file each in ``families/``.
- ``detection``: which of them a checkpoint needs, ``choose_family``.
- ``parts``: the weights inside a fused tensor, as views, ``find_parts``.
- ``layouts``: find the tower of one checkpoint, ``locate_tower``.
- ``kinds``: what a module is, ``module_kind``.
- ``vocabulary``: tokenizer files and row maps, ``read_vocabulary``.
- ``config_differences``: what two text configs compute differently.
- ``pairs``: the values a pairing consists of.
- ``token_differences``: what two tokenizers say differently.
- ``ancestry``: whether models come from one another, ``digest_ancestry`` on given samples.
- ``taking_apart``: which fused tensors are merged part by part.
- ``text_config``: the plain config that a family derives, ``derived_config``.
- ``stacks``, ``matching``, ``leftovers``, ``inference``: the tower of a vlm of no known family, ``infer_tower``.
- ``inferred_rule``, ``confidence``: what was inferred as a family file, and how sure that is.
- ``pairing``: the total pairing of base, vlm and ancestor, ``pair_checkpoints``.
"""
