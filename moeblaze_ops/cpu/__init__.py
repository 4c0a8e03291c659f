"""The ops on a CPU, through ATen."""
