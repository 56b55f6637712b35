"""Where the recipes and pairs that come with mergelab lie, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

import mergelab
from mergelab.errors import MachineError


def package_folder() -> Path:
    """Return the folder of the mergelab package itself."""
    return Path(mergelab.__file__).resolve().parent


def configs_folder() -> Path:
    """Return the folder of the shipped recipes, with ``pairs/`` inside.

    A wheel carries it as ``mergelab/configs``; in a checkout it is ``configs`` beside the package.

    Raises:
        MachineError: Neither is there: the installation is incomplete.
    """
    package = package_folder()
    candidates = (package / "configs", package.parent / "configs")
    for folder in candidates:
        if (folder / "pairs").is_dir():
            return folder
    looked = " and ".join(str(folder) for folder in candidates)
    raise MachineError(f"The shipped recipes are missing: looked for {looked}. Install mergelab again.")


def list_recipes() -> dict[str, Path]:
    """Return the shipped recipes, name to file, sorted by name."""
    return _yaml_files(configs_folder())


def list_pairs(beside: Path | None = None) -> dict[str, Path]:
    """Return the pairs that a recipe may name, name to file, sorted by name.

    Args:
        beside: The folder of the recipe: its ``pairs/`` comes before the shipped ones.
    """
    own = _yaml_files(beside / "pairs") if beside is not None else {}
    return dict(sorted({**_yaml_files(configs_folder() / "pairs"), **own}.items()))


def _yaml_files(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.yaml")) if path.is_file()}
