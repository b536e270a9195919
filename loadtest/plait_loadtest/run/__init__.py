"""Running a plan: worker processes that send on time and record, a coordinator that starts, stops and merges them.

``clock`` wakes at an instant, ``ledger`` holds what is recorded, ``requests`` has the bytes ready, ``worker`` is one
process, ``coordinator`` the only entrance, ``echo`` the control request beside the load.
"""
