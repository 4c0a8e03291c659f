"""Layers that keep their input and no pre-activation: backward repeats the up projection, as a whole or in parts."""
