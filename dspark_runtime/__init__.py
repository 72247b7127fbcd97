"""The engine: request state, the step loop, acceptance, sampling, target models."""
