"""What people call a module of a text model, read off its canonical name."""

from __future__ import annotations

import re

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_PROJECTION = re.compile(r"(?:^|[._])(qkv|q|k|v|o|gate_up|gate|up|down)_proj\.weight$")


def module_name(name: str, kind: str) -> tuple[str, int | None]:
    """Return what a tensor is called in a table, and the number of its layer (None outside layers).

    Matrices of a layer are called by their projection (``q``, ``k``, ``v``, ``o``, ``gate``, ``up``, ``down``), or by
    their name inside the layer where it is another (``linear_attn.in_proj.weight``, router of experts). All else is
    called by its kind (``module_kind``): embedding, head, norm, bias, other.
    """
    found = _LAYER.match(name)
    layer = int(found[1]) if found else None
    if kind not in ("attention", "mlp") or found is None:
        return kind, layer
    inside = name[found.end() :]
    projection = _PROJECTION.search(inside)
    if projection is None or "experts." in inside:
        return re.sub(r"\.\d+\.", ".N.", inside), layer
    return projection[1], layer
