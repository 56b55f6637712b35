"""What a YAML may say: recipes and pairs, read, checked as a whole, and refused in one message.

Nothing here loads torch, opens a checkpoint or asks the network.
"""

from mergelab.config.canonical import canonical_json
from mergelab.config.cells import Cell, control_cell, grid_cells, selected_cells, zero_point_of
from mergelab.config.guards import announcements
from mergelab.config.load import Experiment, find_recipe, load_experiment, load_recipe
from mergelab.config.overrides import parse_settings
from mergelab.config.packaged import configs_folder, list_pairs, list_recipes
from mergelab.config.pair import Pair, Source, load_pair, pair_from_folders
from mergelab.config.recipe import Claims, Evals, Merge, Recipe, Sink, resolved

__all__ = [
    "Cell",
    "Claims",
    "Evals",
    "Experiment",
    "Merge",
    "Pair",
    "Recipe",
    "Sink",
    "Source",
    "announcements",
    "canonical_json",
    "configs_folder",
    "control_cell",
    "find_recipe",
    "grid_cells",
    "list_pairs",
    "list_recipes",
    "load_experiment",
    "load_pair",
    "load_recipe",
    "pair_from_folders",
    "parse_settings",
    "resolved",
    "selected_cells",
    "zero_point_of",
]
