"""What ops take: how weights are stored, which activations there are, and the checks of arguments."""
