"""Drawing code that several commands share."""
