"""Seeded damage to a checkpoint folder: bytes, headers, indexes, configs, tokenizers, pickles, the file system.

A mutation is a function (random, folder) that changes one file of a folder in place and returns its name.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[random.Random, Path], str]

INDEX = "model.safetensors.index.json"

ODD_NAMES = (
    *("", ".", "..", "../x", "/etc/passwd", "a/../../b", "a\\b", "C:\\x", "~", "x" * 300, "x" * 5000),
    *("nul\0byte", "\ud800", "a\udfffb", "\u202e\u200b", "new\nline", "ünïcode", "\x1b[31m", "__metadata__"),
    *("model.layers.99999999999999999999.mlp.up_proj.weight", "model.layers.-1.mlp.up_proj.weight"),
    *("model.layers.0.mlp.up_proj.weight", "language_model.language_model.model.norm.weight", "lm_head.weight"),
)
ODD_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 255, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**4299),
    *(0.5, 2.0, -0.0, 1e308, float("nan"), float("inf")),
)
DTYPES = ("F32", "F16", "BF16", "F64", "I64", "U8", "I8", "BOOL", "F8_E4M3", "F4", "F6_E2M3", "C64", "f32", "", "XX")


def odd_value(rng: random.Random) -> Any:
    """Anything that JSON can say."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(ODD_NUMBERS)
    if kind == 1:
        return rng.choice(ODD_NAMES)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return [rng.choice(ODD_NUMBERS) for _ in range(rng.randrange(4))]
    if kind == 4:
        return {rng.choice(ODD_NAMES): rng.choice(ODD_NUMBERS) for _ in range(rng.randrange(3))}
    if kind == 5:
        return [2**62] * rng.choice((2, 100, 5000))
    if kind == 6:
        return [1] * rng.choice((8, 70, 5000))
    nested: Any = rng.choice(([], {}, 1))
    for _ in range(rng.choice((3, 50, 400))):
        nested = [nested] if kind == 7 else {"a": nested}
    return nested


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value; of long collections only some."""
    found = [path] if path else []
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in items[:60]:
        found += places(inner, (*path, key))
    return found


def change_json(rng: random.Random, value: Any) -> None:
    """Replace, remove, rename or double one place of a JSON object."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        known = places(value)
        if not known:
            return
        path = rng.choice(known)
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        key = path[-1]
        action = rng.randrange(4)
        if action == 0:
            del parent[key]
        elif action == 1 and isinstance(parent, dict):
            parent[rng.choice(ODD_NAMES)] = parent.pop(key)
        elif action == 2:
            other: Any = value
            for step in rng.choice(known):
                try:
                    other = other[step]
                except (KeyError, IndexError, TypeError):
                    break
            parent[key] = json.loads(json.dumps(other))
        else:
            parent[key] = odd_value(rng)


def raw_json(rng: random.Random, value: Any) -> bytes:
    """Encode a JSON value, now and then with damage that no encoder would make."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.7)
    odd = rng.randrange(14)
    if odd == 0 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + ", " + text[1:]  # every key twice
    elif odd == 1:
        text = "[" * 50_000 + text
    elif odd == 2:
        text = '{"a":' * 3000 + text + "}" * 3000
    elif odd == 3:
        text += rng.choice((" ", "\n", "\0", "x", "{}"))
    elif odd == 4:
        text = rng.choice((" ", "\ufeff", "\0", "x")) + text
    elif odd == 5:
        text = text.replace(rng.choice("0123456789"), str(rng.choice((*ODD_NUMBERS, 10**3000))), 1)
    data = text.encode("utf-8", errors="surrogatepass")
    return text.encode("utf-16", errors="surrogatepass") if odd == 6 else data


def json_file(rng: random.Random, path: Path) -> str:
    """Change one JSON file in structure."""
    value = json.loads(path.read_bytes())
    change_json(rng, value)
    path.write_bytes(raw_json(rng, value))
    return path.name


def index(rng: random.Random, folder: Path) -> str:
    """Send some tensors of the index elsewhere, or change it in any other way."""
    path = folder / INDEX
    if not path.exists():
        return config(rng, folder)
    if rng.random() < 0.4:
        return json_file(rng, path)
    value = json.loads(path.read_bytes())
    names, files = (
        list(value["weight_map"]),
        sorted({*value["weight_map"].values(), *(path.name for path in folder.iterdir())}),
    )
    for _ in range(rng.choice((1, 1, 2, len(names)))):
        value["weight_map"][rng.choice((*names, *ODD_NAMES))] = rng.choice(
            (*files, *ODD_NAMES, "x" * 300 + ".safetensors")
        )
    path.write_bytes(raw_json(rng, value))
    return path.name


def config(rng: random.Random, folder: Path) -> str:
    return json_file(rng, folder / "config.json")


def tokenizer(rng: random.Random, folder: Path) -> str:
    return json_file(rng, folder / rng.choice(("tokenizer.json", "tokenizer_config.json")))


def header(rng: random.Random, folder: Path) -> str:
    """Change the JSON header of one weight file, and give it the length it then has (or does not have)."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    value, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    entries = [entry for name, entry in value.items() if name != "__metadata__"]
    action = rng.randrange(10)
    one, two = rng.sample(entries, 2)
    if action == 0:
        one["dtype"] = rng.choice(DTYPES)
    elif action == 1:
        one["shape"] = rng.choice(
            (one["shape"][::-1], [*one["shape"], 1], [], [0], [rng.choice(ODD_NUMBERS)], two["shape"])
        )
    elif action == 2:
        place = rng.randrange(2)
        one["data_offsets"][place] += rng.choice((-8, -1, 1, 2, 8, 2**62, -(2**62)))
    elif action == 3:
        one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
    elif action == 4:
        one["data_offsets"] = two["data_offsets"]
    elif action == 5:
        far = rng.choice((10**4299, 10**4300 - 1, 2**63, len(data)))
        value[rng.choice(ODD_NAMES)] = {"dtype": "F32", "shape": [0], "data_offsets": [far, far]}
    elif action == 6:
        name = rng.choice([name for name in value if name != "__metadata__"])
        value[rng.choice(ODD_NAMES)] = value.pop(name)
    elif action == 7:
        value["vision_tower.again.weight"] = dict(one)  # two tensors of the same bytes
    else:
        change_json(rng, value)
    text = raw_json(rng, value)
    stated = (
        len(text)
        if rng.random() < 0.85
        else rng.choice((0, 1, 7, len(text) - 1, len(text) + 1, 10**8 + 1, 2**63, 2**64 - 1))
    )
    path.write_bytes(struct.pack("<Q", max(0, stated)) + text + data)
    return path.name


def some_bytes(rng: random.Random, folder: Path) -> str:
    """Flip, cut, insert or repeat bytes of any file."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    raw = bytearray(path.read_bytes())
    # Headers, indexes and the ends of files are where most damage can be done.
    place = rng.choice((rng.randrange(len(raw) + 1), rng.randrange(min(16, len(raw)) + 1), len(raw)))
    action = rng.randrange(6)
    if action == 0:
        for _ in range(rng.choice((1, 1, 4, 64))):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif action == 1:
        del raw[place:]
    elif action == 2:
        raw[place:place] = rng.randbytes(rng.choice((1, 2, 8, 100)))
    elif action == 3:
        del raw[place : place + rng.choice((1, 2, 8, 100))]
    elif action == 4:
        raw[place : place + 8] = struct.pack("<Q", rng.choice((0, 2**63, 2**64 - 1, 10**8, len(raw))))
    else:
        raw = bytearray(rng.choice((b"", b"\0" * 64, b"version https://git-lfs.github.com/spec/v1\n", bytes(raw) * 2)))
    path.write_bytes(bytes(raw))
    return path.name


def file_system(rng: random.Random, folder: Path) -> str:
    """Put something else in the place of a file."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path, other = rng.choice(files), rng.choice(files)
    action = rng.randrange(8)
    content = path.read_bytes()
    path.unlink()
    if action == 1:
        path.mkdir()
    elif action == 2:
        path.symlink_to(path.name)
    elif action == 3:
        path.symlink_to("/nowhere/at/all")
    elif action == 4:
        os.mkfifo(path)
    elif action == 5:
        outside = folder.parent / f"outside-{path.name}"
        outside.write_bytes(content)
        path.symlink_to(outside)
    elif action == 6 and other != path:
        path.write_bytes(other.read_bytes())
    elif action == 7:
        path.symlink_to("/dev/zero" if rng.random() < 0.5 else "/proc/self/mem")
    return path.name


SAFETENSORS: tuple[Mutation, ...] = (
    header,
    header,
    header,
    index,
    some_bytes,
    some_bytes,
    config,
    tokenizer,
    file_system,
)
PICKLED: tuple[Mutation, ...] = (some_bytes, some_bytes, config, file_system)
