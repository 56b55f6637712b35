"""Can a model be shown pictures? Asked before any work, of a single model, of a pair, and by the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mergelab.errors import RecipeError
from mergelab.live.configs import has_vlm_class
from mergelab.towers.layouts import Tower


def check_sight(tasks: Sequence[str], source: str, folder: Path, tower: Tower) -> None:
    """Refuse picture tasks for a model that cannot be shown pictures.

    Args:
        tasks: Names of the picture tasks; none is never refused.
        source: How messages call the model.
        folder: Its folder.
        tower: Its language tower.

    Raises:
        RecipeError: It is a text model, or transformers has no class for the whole vlm.
    """
    if not tasks or (tower.sees_pictures and has_vlm_class(folder, tower.family)):
        return
    what = "a vlm without a class in transformers" if tower.sees_pictures else "a text model"
    raise RecipeError(
        f"{source}: {what} cannot see the pictures of {', '.join(tasks)}. Name other tasks (evals.tasks, --tasks)."
    )
