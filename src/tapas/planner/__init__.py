"""The drivers: from a graph to a plan, within memory limits, over all meshes, and explained."""
