"""The trainer: drives a task to a trained model, and resumes it exactly after any stop."""
