"""The tasks of post-training: a module a method, whose `make` reads the data and checks it."""
