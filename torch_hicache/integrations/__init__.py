"""Adapters for engines that people use, one module each. Nothing here is imported by torch_hicache
itself, and an adapter imports its engine only when it is used."""
