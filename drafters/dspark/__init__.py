"""Drafters that read the target's hidden states: DSpark and DFlash (a block in one pass) and EAGLE-3."""
