"""Running a plan: worker processes that send on time and record, and a coordinator that starts, stops and merges them.

`ledger` holds what is recorded, `pace` what is sent and when, `worker` is one process, `coordinator` the only entry
point, `echo` the control request beside the load.
"""
