"""A discrete-event simulation of serving: the schedulers of the engine against a cost curve and an acceptance model."""
