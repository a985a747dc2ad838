"""Drawing shared by the commands."""
