"""``pion-vllm-mlx serve``: an HTTP front that never imports mlx, over an engine process.

``main`` starts both; ``app`` is the endpoints, ``anthropic_*`` and ``responses_*`` translate
(pure, no I/O), ``supervisor`` keeps the engine, ``engine_client`` talks to it.  What an engine
has to do is written in ``engine_child``, which is what an engine uses.
"""
