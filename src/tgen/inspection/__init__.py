"""Looking inside a model: the attention it pays, the tokens it expects, what it is made of."""
