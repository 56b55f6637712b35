"""From a recipe to finished points: the grid, what identifies a point, and the workers that make it."""
