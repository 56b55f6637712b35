"""mergelab: does a weight merge give a vision-language model its text ability back?

The rooms of the house and what each may know are described in ``ARCHITECTURE.md`` beside this file. Nothing
heavy is imported here: ``import mergelab`` and ``mergelab --help`` do not load torch.
"""

__version__ = "0.1.0"
