"""The two lm-eval tasks of the bench pair; the YAML files name functions of ``bench_tasks``."""
