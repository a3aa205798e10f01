"""Attention where the prefix lives: ATTEND.PREFIX.* without its words.

::

    slots.py     which (session, layer) is WARM, COLD or MISSING, and who leaves
    resident.py  the K/V of one layer as they are kept, and from what they are made
    requests.py  what a query asks for, checked, and its arithmetic (kernels.api)
    engine.py    the one thread that computes; concurrent queries of one layer together
    warming.py   K/V from the rows of the V-store
    chains.py    K/V from the rows of a namespace and of those that it continues
    sharing.py   K/V that begin alike, over blocks that they share (shared_blocks.py)
    cache.py     all of it behind one object, which commands and the binary lane call
    frames.py    the opcode of the binary lane
"""
