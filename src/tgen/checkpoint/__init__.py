"""A model directory in the layout that the whole field reads."""
