"""The commands: parse options, print reports. Only this package imports typer and rich."""
