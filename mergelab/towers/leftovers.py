"""What the tensors beside an inferred tower are: vision, projector, extra, other or unknown."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mergelab.towers.generic import BUFFER
from mergelab.towers.layouts import role_of
from mergelab.towers.parts import EMBEDDING
from mergelab.towers.stacks import Shape, find_stacks

VISION_WORDS = re.compile(
    r"(?:^|[._])(?:vision|visual|vit|vpm|image|img|images|pixel|patch\w*|clip|siglip|dino\w*|eye|audio|speech|whisper"
    r"|vte|visual_tokenizer|video)(?=$|[._\d])"
)
PROJECTOR_WORDS = re.compile(
    r"(?:^|[._])(?:\w*projector|connector|aligner|merger|resampler|mlp1|adapter|bridge|\w*newline|view_seperator)"
    r"(?=$|[._\d])"
)
EMBEDDING_WORDS = re.compile(r"emb|wte|tok")


def not_vision(name: str) -> bool:
    """Say whether nothing in a name speaks of pictures."""
    return not (role_of(name) or VISION_WORDS.search(name) or PROJECTOR_WORDS.search(name))


def place_rest(
    tensors: Mapping[str, Shape], prefix: str, inner: Mapping[str, str], outside: Mapping[str, str]
) -> dict[str, str]:
    """Return the role of every tensor outside the tower.

    Args:
        tensors: Stored name -> shape.
        prefix: Of the tower's layers.
        inner: Stored name -> role of what lies inside them and is not the base's.
        outside: Canonical -> stored name of what the tower has beside its layers.

    Returns:
        Stored name -> vision, projector, extra, other or unknown. unknown are tensors among the tower's own that the
        base lacks and that no word explains: the text path may need them. other lies elsewhere.
    """
    home, taken = prefix.rpartition(".")[0], set(outside.values())
    embedding = outside.get(EMBEDDING, "")
    width = tensors[embedding][1:] if embedding else ()
    groups = {name: group_of(name, prefix) for name in tensors}
    pictured = {groups[name] for name, shape in tensors.items() if len(shape) >= 4}
    numbered = {group_of(f"{stack}.0", prefix) for stack in find_stacks(tensors)}
    roles: dict[str, str] = {}
    for name, shape in tensors.items():
        if name in taken or name.startswith(f"{prefix}."):
            if name in inner:
                roles[name] = inner[name]
        elif BUFFER.search(name):
            roles[name] = "extra"
        elif role := role_of(name) or word_role(name, home):
            roles[name] = role
        elif width and tuple(shape[1:]) == width and EMBEDDING_WORDS.search(name) and name.startswith(home):
            roles[name] = "extra"  # rows of an embedding in two pieces
        elif groups[name] in pictured:
            roles[name] = "vision"
        else:
            at_home = groups[name].rpartition(".")[0] == home
            roles[name] = "unknown" if at_home and groups[name] not in numbered else "other"
    return roles


def group_of(name: str, prefix: str) -> str:
    """Return the leading part of a name up to where it leaves the path to the tower's layers."""
    parts, path = name.split("."), prefix.split(".")
    shared = next((n for n, (a, b) in enumerate(zip(parts, path, strict=False)) if a != b), min(len(parts), len(path)))
    return ".".join(parts[: shared + 1])


def word_role(name: str, home: str) -> str:
    """Return the role that a word of a name gives away, empty without one."""
    rest = name.removeprefix(f"{home}.") if home else name
    if PROJECTOR_WORDS.search(rest):
        return "projector"
    return "vision" if VISION_WORDS.search(rest) else ""
