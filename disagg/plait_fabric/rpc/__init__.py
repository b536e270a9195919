"""Request and reply over channels: one client, one server, for every workload.

::

    Client ──> Connection ──calls──>  Server ──> Peer ──on_message──> the workload
       ^            └──<──answers─────────────────┘
       └─ replicas (which one), backoff (when again), handshake (who is there), fields (what a header may say)

A call is open from `Connection.call` until its answer is taken, it is withdrawn, or its connection is lost; then the
workload's policy decides whether it is asked again elsewhere. What messages say is the workload's: headers and hello
payloads pass through here unread. Nothing here imports torch.
"""
