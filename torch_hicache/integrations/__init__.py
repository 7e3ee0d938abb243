"""Adapters for engines that people use, one module each. torch_hicache itself imports none of them, and
an adapter imports its engine only when it is used."""
