"""The commands: options in, reports drawn. The only place that knows typer and rich."""
