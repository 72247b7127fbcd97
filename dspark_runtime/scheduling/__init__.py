"""Confidence-scheduled verification: which drafts of which request the target verifies (drafters fact sheet §5)."""
