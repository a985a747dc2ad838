"""The interactive page of `tgen inspect --html`."""
