"""Open a checkpoint folder: find its weight files, check every header, read its config. No tensor data.

Only what the folder itself declares is read: the files that ``model.safetensors.index.json`` lists, or
``model.safetensors``; without either, those of ``pytorch_model.bin.index.json``, or ``pytorch_model.bin``. Other
``*.safetensors`` files (consolidated twins, adapters) are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mergelab.checkpoints.pickled import read_pickled_headers
from mergelab.checkpoints.safetensors_format import TensorHeader, read_headers
from mergelab.errors import DamagedFileError, problem_list
from mergelab.strict_json import nested_deeper, read_object, shown
from mergelab.strides import View

__all__ = ["INDEX_NAME", "SINGLE_NAME", "Checkpoint", "TensorHeader", "open_checkpoint"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLED_NAME = "pytorch_model.bin"

MAX_NESTING = 50
MAX_FILE_NAME = 255

TOWER_FOLDER = "llm"
"""Where VILA and NVILA keep their text tower, as an ordinary causal LM beside ``vision_tower`` and ``mm_projector``."""

PACKED_DTYPES = ("U8", "I8", "F4", "F6_E2M3", "F6_E3M2")
"""Codes in which quantised weights are stored; every F8 code counts as well."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose headers were all checked."""

    folder: Path
    """Where weights, config and tokenizer lie."""
    tensors: Mapping[str, TensorHeader]
    """By stored name, in name order."""
    config: Mapping[str, Any]
    """``config.json`` as it stands."""
    shards: tuple[Path, ...]
    """The weight files, in name order."""
    parts: Mapping[str, TensorHeader] = field(default_factory=dict)
    """Weights inside fused tensors, by a name made up for each; see ``with_parts``."""
    repository: Path | None = None
    """Of a tower that is a folder of its own inside a larger model's (``TOWER_FOLDER``): that model's folder."""
    on_hub: bool = False
    """Whether the weights are not on this machine; what is read of them is fetched."""

    def header(self, name: str) -> TensorHeader:
        """Return the header of a tensor, or of a part of one."""
        return self.parts[name] if name in self.parts else self.tensors[name]

    def with_parts(self, parts: Mapping[str, tuple[str, View]]) -> Checkpoint:
        """Return the same checkpoint with weights inside fused tensors to be read by names of their own.

        Args:
            parts: Name of the part -> stored name of its tensor, and which entries it has.

        Raises:
            ValueError: A part leaves its tensor, or takes a stored name.
        """
        headers = {}
        for name, (stored, view) in parts.items():
            whole = self.tensors[stored]
            if name in self.tensors or view.whole.offset + view.whole.span > whole.num_entries:
                raise ValueError(f"{name}: no part of {stored} {whole.shape}: {view}")
            headers[name] = replace(whole, name=name, shape=view.shape, view=view)
        return replace(self, parts=headers)

    @property
    def is_pickled(self) -> bool:
        """True if the weights were read through torch's weights-only loading."""
        return any(path.suffix == ".bin" for path in self.shards)

    @property
    def num_bytes(self) -> int:
        """Size of all tensor data."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


INSTEAD = (
    ("mxfp4", "load it with Mxfp4Config(dequantize=True) in transformers and save it again"),
    ("fp8", "use its BF16 repository, or load it with FineGrainedFP8Config(dequantize=True) and save it again"),
    ("", "use the checkpoint that it was quantised from"),
)
"""Part of a quantisation method's name, and what to use instead of such a checkpoint; the first that fits."""


@dataclass(frozen=True)
class WeightFiles:
    """How to look at weight files: those of this machine, or of the hub."""

    exists: Callable[[Path], bool]
    headers: Callable[[Path], tuple[list[TensorHeader], list[str]]]
    """Tensors of one file, and what is wrong with it."""
    on_hub: bool = False


def stored_headers(path: Path) -> tuple[list[TensorHeader], list[str]]:
    """Read the tensors of a file on this machine."""
    if not path.is_file():
        return [], ["is a folder, pipe or device, not a file"]
    return read_pickled_headers(path) if path.suffix == ".bin" else read_headers(path)


ON_DISK = WeightFiles(Path.exists, stored_headers)


def open_checkpoint(folder: Path, files: WeightFiles = ON_DISK) -> Checkpoint:
    """Check a checkpoint folder and return where every tensor lies.

    Of several names for the same bytes (a tied head in a pickled file) the first stays. A folder without weights of
    its own whose ``llm/`` is a checkpoint (VILA) is opened as that text checkpoint, which knows its ``repository``.

    Raises:
        DamagedFileError: With all problems at once: no folder, no or broken ``config.json``, no safetensors
            weights (other pickles and GGUF weights are named as such), an index that names missing, foreign or
            wrong files, a tensor in two files or in another file than the index says, a damaged or
            truncated file, quantised weights.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise DamagedFileError(f"{folder}: expected a checkpoint folder, found {found}. Correct the path.")
    if keeps_tower_apart(folder, files.exists):
        return replace(open_checkpoint(folder / TOWER_FOLDER, files), repository=folder)
    problems: list[str] = []
    config = read_json(folder / "config.json", problems)
    declared = declared_files(folder, problems, files.exists)
    tensors: dict[str, TensorHeader] = {}
    for file_name, listed in declared.items():
        path = folder / file_name
        if not files.exists(path):
            problems.append(f"{file_name}: missing, the index lists {len(listed or ())} tensors in it")
            continue
        headers, found_problems = files.headers(path)
        problems.extend(f"{path.name}: {problem}" for problem in found_problems)
        for header in headers:
            if header.name in tensors:
                problems.append(f"{header.name}: lies in {tensors[header.name].path.name} and in {path.name}")
            elif listed is not None and header.name not in listed:
                owner = next((other for other, names in declared.items() if names and header.name in names), None)
                says = f"the index says {owner}" if owner else "the index does not list it"
                problems.append(f"{header.name}: lies in {path.name}, {says}")
            tensors[header.name] = header
        if listed is not None and not found_problems:
            absent = sorted(listed - {header.name for header in headers})
            problems.extend(f"{shown(name)}: the index says {path.name}, which does not hold it" for name in absent)
    if declared and not tensors and not problems:
        problems.append("the weight files hold no tensors")
    problems.extend(quantisation_problems(config, tensors))
    if problems:
        raise DamagedFileError(
            problem_list(
                f"{folder}: the checkpoint cannot be used. Problems: {len(problems)}.",
                shortened(problems),
                "Get the missing or damaged files again, or give another folder.",
            )
        )
    kept = first_names(tensors)
    ordered = {name: kept[name] for name in sorted(kept)}
    shards = tuple(folder / name for name in declared)
    return Checkpoint(folder, ordered, config, shards, on_hub=files.on_hub)


def keeps_tower_apart(folder: Path, exists: Callable[[Path], bool] = Path.exists) -> bool:
    """Say whether a folder holds no weights itself, but a checkpoint in ``TOWER_FOLDER``."""
    names = (INDEX_NAME, SINGLE_NAME, PICKLED_INDEX_NAME, PICKLED_NAME)
    return (folder / TOWER_FOLDER / "config.json").is_file() and not any(exists(folder / name) for name in names)


def first_names(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors without later names for the same bytes."""
    seen: set[tuple[Path, int, tuple[int, ...]]] = set()
    kept = {}
    for name, header in tensors.items():
        place = (header.path, header.start, header.shape)
        if place not in seen or not header.num_bytes:
            kept[name] = header
        seen.add(place)
    return kept


def declared_files(
    folder: Path, problems: list[str], exists: Callable[[Path], bool] = Path.exists
) -> dict[str, set[str] | None]:
    """Return the weight files a folder declares, each with the tensor names of the index (None: no index).

    The files need not be there. An unusable index, or no declaration at all, is added to ``problems``.
    """
    single, index, suffix = folder / SINGLE_NAME, folder / INDEX_NAME, ".safetensors"
    if not exists(index) and not exists(single):
        single, index, suffix = folder / PICKLED_NAME, folder / PICKLED_INDEX_NAME, ".bin"
    if not exists(index):
        if exists(single):
            return {single.name: None}
        problems.append(no_weights(folder))
        return {}
    weight_map = read_json(index, problems).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{index.name}: expected a weight_map that maps tensor names to files")
        return {}
    files: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not is_plain_name(name) or not name.endswith(suffix):
            problems.append(
                f"{index.name}: {shown(tensor)} lies in {shown(name)!r}, expected a {suffix} file of this folder"
            )
        else:
            files.setdefault(name, set()).add(tensor)
    if exists(single) and single.name not in files:
        problems.append(f"holds two checkpoints: {single.name} and the files of {index.name}; remove one of them")
    return {name: files[name] for name in sorted(files)}


def is_plain_name(name: str) -> bool:
    """Say whether ``name`` is a bare file name, without folders or escapes."""
    fits = name not in ("", ".", "..") and name.isprintable() and len(name.encode()) <= MAX_FILE_NAME
    return fits and not any(sign in name for sign in "/\\")


def no_weights(folder: Path) -> str:
    """Say which weights were found instead of safetensors."""
    names = sorted(path.name for path in folder.iterdir())
    wanted = f"no weights: neither {INDEX_NAME} nor {SINGLE_NAME}"
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")) and "model" in name]
    gguf = [name for name in names if name.endswith(".gguf")]
    others = [name for name in names if name.endswith(".safetensors")]
    if pickled:
        return f"{wanted}; {pickled[0]} is pickled under a name that is not read, convert it to safetensors"
    if gguf:
        return f"{wanted}; {gguf[0]} is a GGUF file (quantised weights), use the original safetensors checkpoint"
    if others:
        return f"{wanted}; {', '.join(others[:3])} is not named by either"
    return wanted


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a JSON object; on failure add a problem and return an empty one."""
    try:
        value = read_object(path)
    except FileNotFoundError:
        problems.append(f"{path.name}: missing")
    except OSError as error:
        problems.append(f"{path.name}: cannot be read: {error.strerror}")
    except ValueError as error:
        problems.append(f"{path.name}: not valid JSON: {error}")
    else:
        if not nested_deeper(value, MAX_NESTING):
            return value
        problems.append(f"{path.name}: nested more than {MAX_NESTING} levels deep")
    return {}


def quantisation_problems(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> list[str]:
    """Name a quantised checkpoint by its ``quantization_config`` (top level or nested) and its tensors."""
    places = {"config.json": config, **{f"config.json {key}": value for key, value in config.items()}}
    problems = []
    for place, section in places.items():
        settings = section.get("quantization_config") if isinstance(section, Mapping) else None
        if settings:
            method = shown(settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings)
            advice = next((text for part, text in INSTEAD if part in method.lower()), INSTEAD[-1][1])
            problems.append(
                f"{shown(place)}: quantization_config {method!r}: quantised weights cannot be merged; {advice}"
            )
    if problems:
        packed = [t for t in tensors.values() if t.dtype in PACKED_DTYPES or t.dtype.startswith("F8")]
        problems.extend(f"{tensor.name}: packed as {tensor.dtype} {tensor.shape}" for tensor in packed)
    return problems


def shortened(problems: list[str], limit: int = 20) -> list[str]:
    """Return the first ``limit`` problems, and how many more there are."""
    more = len(problems) - limit
    return problems if more <= 0 else [*problems[:limit], f"({more} more)"]
