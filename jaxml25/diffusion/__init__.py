"""Diffusion models: schedules, samplers, networks, and the methods that steer them."""
