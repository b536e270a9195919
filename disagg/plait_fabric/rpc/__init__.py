"""Request and reply over channels: one client and one server for every workload.

::

    Client ──> Connection ──calls──>  Server ──> Peer ──on_message──> the workload
       ^            └──<──answers─────────────────┘
       └─ replicas (which one), outages (when again), fields (who is there, what a header may hold)

A call is open from `Connection.call` until its answer is taken, it is withdrawn, or its connection is lost; then the
workload's policy decides whether it is retried elsewhere. The contents of messages are the workload's business:
headers and hello payloads pass through here unread. Nothing here imports torch.
"""
