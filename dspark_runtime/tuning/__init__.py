"""Choosing draft lengths and trees from measured costs and acceptance. No torch."""
