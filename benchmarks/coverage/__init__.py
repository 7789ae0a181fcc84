"""How many models that nobody here wrote are extracted, and run on cores with equal results."""
