"""How many workers of each role there are, and which one leaves. Pure."""
