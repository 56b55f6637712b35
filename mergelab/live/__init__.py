"""The live model of a pair: one set of tower weights with a text view and, for pictures, the re-assembled vlm."""
