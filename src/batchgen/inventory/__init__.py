"""What the model is made of and what the machine has: facts, no decisions."""
