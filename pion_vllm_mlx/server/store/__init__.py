"""The durable store: rows in segments, effects in a WAL, one index over both.

Knows no command and no connection. The pieces, from the bottom:

``files``      file descriptors that close themselves, and flushing to disk
``shapes``     how the rows of one run lie in a file
``records``    the logged effects, one class each
``framing``    the bytes of a log file; scanning it; torn ends and damage
``wal``        the log: append, truncate, flush
``disk_use``   what segment files occupy
``folder_use`` what everything else in the folder occupies
``segment``    a file that holds rows, readable by safetensors when sealed;
               ``segment_header`` writes its header
``segments``   the folder of them, and the open one of every group
``blocks``     which blocks of tokens a namespace holds
``index``      sessions, runs of rows, states
``totals``     what is counted over all sessions, kept up to date
``state``      the whole index; ``State.apply`` is its only writer
``rows``       writing the rows of a run, reading and verifying them
``sealing``    what lies in a segment; short runs out of the log into it
``snapshot``   the manifest that a SAVE writes
``salvaging``  what is kept of a damaged snapshot, and of the segments it named
``recovery``   from files to a state
``eviction``   who goes when a limit is reached
``space``      regions of segments under a disk budget
``saving``     SAVE: everything sealed, snapshots written, logs shortened
``store``      all of it behind one object
``verifying``  what does not verify is dropped before anybody uses it
``compaction`` which runs to copy where dead bytes lie between them
``sharing``    equal rows of one owner, stored once
``reclaim``    both in quiet moments, a step at a time
"""
