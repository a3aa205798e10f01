"""The keyspace: the part of Redis that clients of the store need, kept small.

::

    values.py     what a key may hold
    changes.py    effects, and their bytes in the log
    data.py       the keys, the one function that changes them, a layer for transactions
    glob.py       patterns of KEYS and SCAN
    keyspace.py   log, apply, save, expire, watch
    recovery.py   from the files of a folder to the keys
    standing.py   what a log says by itself, without the snapshot before it

Values live in memory, as in Redis: this is for metadata, journals and a remote
cache's blobs, not what the server exists for. There is no library to keep: those
that speak Redis in Python keep nothing on disk, and those that keep something do
not log effects that replay bit-equal. Of the store's own parts it uses the frames,
the log and the way snapshots are published.
"""
