"""From logits to text: one sampler for every engine, cached or not, one row or many."""
