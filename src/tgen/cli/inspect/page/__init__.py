"""The HTML page of `tgen inspect --html`."""
