"""Training a DSpark drafter: prompts, the target's own answers, block losses (fact sheet §3)."""
