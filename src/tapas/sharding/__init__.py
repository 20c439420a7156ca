"""States and layouts of tensors on a mesh, and the routes between layouts."""
