"""This computer: its CPUs and their load, memory, container limits and devices."""
