"""Generation: requests and logits in, tokens out."""
