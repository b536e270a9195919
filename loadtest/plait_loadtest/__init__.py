"""An honest load generator for diffusion and ranking servers: open loop, latency from the scheduled time.

Dependencies point one way: `cli` > `capacity` > `run` > `wire`; `report` and `measure` read records; `plan` joins
`arrivals` and `mix`; all modules may use `scenario`, `values` and `errors`. Nothing here imports another package of
plait, torch or Ray.
"""
