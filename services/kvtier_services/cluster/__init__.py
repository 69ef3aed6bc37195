"""Starting and stopping: `kvtier up`, `down`, and who runs.

    process     a process, told apart from a later one with the same pid
    state       the state file: what `up` started, so that `down` ends exactly that
    head        a Ray head of kvtier's own, as a subprocess
    actors      the only module with `ray`: places, finds, calls and kills actors
    parts       what the CPU tier's process gets from the layers above it
    up, down    the two commands; farewell: the part of `down` that needs Ray, as a process with a deadline
    stay        `up --stay`: in a pod, or under systemd
    look        who runs, and the status

What `up` starts, it first writes into the state file: an `up` that is cut short can be ended by `down` too. What that
ends is found by pid and start time and by a mark in its environment, never by name: a Ray that somebody else runs on
the machine is none of kvtier's business. `ray stop` is never called, it would end that one too.

Ray's token authentication is set explicitly for every process of kvtier's own cluster, because Ray's default depends on
a file in the user's home. With an address of a running cluster, that cluster's settings stay as the user made them.
"""
