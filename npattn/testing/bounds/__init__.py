"""How far a result may be off: rounding models, and the bounds derived from them."""
