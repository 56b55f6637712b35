"""The bench pair: a tiny ancestor, base and vlm with two tasks, all package data, and the builder behind it.

``data/pair`` holds the trained checkpoints, ``data/tasks`` the lm-eval tasks; both are read as files, without
importing this room. The modules here made them: ``facts`` and ``formats`` (text), ``pictures``,
``tokenizer``, ``models``, ``stages`` and ``train`` (training), ``gates`` (what a build must reach), ``build``
(all of it), ``tasks`` (the task data), ``adapt`` (a vlm from a person's own text model).
"""
