"""Tasks and strict graders through lm-eval: receives a model and a tokenizer, returns samples and metrics.

Start at ``suite.load_suite``. What a protocol fixes is in ``protocols``, which tasks are known in ``tasks``;
both load without torch. Verdicts over the samples live in ``mergelab.report``.
"""
