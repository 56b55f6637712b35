"""Package data of the bench pair: trained checkpoints and lm-eval tasks."""
