"""How a model learns: the plan, the steps, the optimizer, and a state that can be resumed."""
