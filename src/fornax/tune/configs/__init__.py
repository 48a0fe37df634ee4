"""What a user may say about each method of preference and distillation. No JAX here."""
