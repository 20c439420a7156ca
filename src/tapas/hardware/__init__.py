"""The hardware a plan is made for: devices, links, meshes, presets, and how much memory there is."""
