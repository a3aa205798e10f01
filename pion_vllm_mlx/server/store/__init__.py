"""The durable store: rows in segments, effects in a WAL, one index over both.

Knows no command and no connection. The pieces, from the bottom:

``files``      file descriptors that close themselves, and flushing to disk
``shapes``     how the rows of one run lie in a file
``records``    the logged effects, one class each
``wal``        the log: framing, scanning, damage
``segments``   the files that hold rows, readable by safetensors when sealed
``state``      the index; ``State.apply`` is its only writer
``snapshot``   the manifest that a SAVE writes
``recovery``   from files to a state
``eviction``   who goes when a limit is reached
``space``      regions of segments under a disk budget
``store``      all of it behind one object
"""
