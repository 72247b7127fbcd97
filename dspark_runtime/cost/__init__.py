"""What a step costs before it is run: facts of models and machines, the operations of a step, their time in layers."""
