"""How good a model is: perplexity, verified generations, comparisons, pass@k, task suites."""
