"""What a model's routers choose: recorded, replayed, counted and balanced. Works on models as they are, eager or compiled."""
