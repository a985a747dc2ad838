"""What this computer has: CPUs and their load, memory, limits of a container, devices."""
