"""The loop around the pure functions: meshes, steps, checkpoints, metrics, claims."""
