"""Learning quality and training speed."""
